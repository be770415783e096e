#include "launch.h"
#include "meet.cuh"
#include "row_pump.cuh"

namespace waybill::cuda {
namespace {

constexpr unsigned all_lanes = 0xFFFFFFFFU;
constexpr int vector_warps = 16;

/// How each rank's rows come.
struct Sources {
  std::int32_t streams[max_gpu_ranks];
  std::int32_t groups[max_gpu_ranks];  ///< tokens of a stream that are published together
  std::int32_t tokens[max_gpu_ranks];
  std::int32_t units[max_gpu_ranks];  ///< groups of all its streams
  std::int32_t most_units;
};

__device__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

/// Where the source raises what it has sent to this rank.
__device__ std::uint64_t* stream_slot(const RowsParams& p, std::int32_t at, std::int32_t source,
                                      std::int32_t stream) {
  return p.streams[at] + std::int64_t{source} * max_streams + stream;
}

__device__ std::uint64_t* config_slot(const RowsParams& p, std::int32_t at, std::int32_t source) {
  const std::int64_t first = std::int64_t{p.shape.world_size} * max_streams;
  return p.streams[at] + first + std::int64_t{p.m.turn} * p.shape.world_size + source;
}

/// Tells all ranks that the tokens of the first `groups` groups of a stream have arrived. One warp;
/// its stores are complete.
__device__ void publish_groups(const RowsParams& p, std::int32_t stream, std::uint64_t epoch,
                               std::int32_t groups) {
  __threadfence_system();
  __syncwarp();
  for (std::int32_t k = lane_id(); k < p.shape.world_size; k += 32) {
    const std::int32_t d = (p.shape.rank + k) % p.shape.world_size;
    publish(stream_slot(p, d, p.shape.rank, stream),
            (epoch << stream_epoch_shift) + static_cast<std::uint64_t>(groups));
  }
}

/// Sends the tokens stream, stream + streams, ..., each once to every rank that it goes to.
template <class Pump>
__device__ void send_stream(const RowsParams& p, Pump& pump, std::int32_t stream,
                            std::int32_t streams, std::uint64_t epoch) {
  const MoeShape& s = p.shape;
  const auto place_of = [&](std::int32_t token) {
    return lane_id() < s.topk && token < s.num_tokens
               ? p.places[std::int64_t{token} * s.topk + lane_id()]
               : -1;
  };
  std::int32_t in_group = 0;
  std::int32_t groups = 0;
  std::int64_t next = place_of(stream);
  for (std::int32_t t = stream; t < s.num_tokens; t += streams) {
    const bool sends = next >= 0 && (next & place_leader_bit) != 0 &&
                       (next & 0xFFFFFFFF) < s.capacity;
    const std::int64_t place = sends ? next & ~place_leader_bit : -1;
    next = place_of(t + streams);
    const PumpSource from{p.tokens + std::int64_t{t} * p.cuts.row_bytes,
                          p.scales == nullptr ? nullptr
                                              : p.scales + std::int64_t{t} * p.cuts.scale_bytes};
    for (std::int32_t piece = 0; piece < p.cuts.pieces; ++piece) pump.push(from, piece, place);
    if (++in_group < p.cuts.group) continue;
    in_group = 0;
    if (++groups < 2) continue;
    pump.wait_earlier();
    publish_groups(p, stream, epoch, groups - 1);
  }
  pump.wait_all();
  if (groups > 0 || in_group > 0) publish_groups(p, stream, epoch, groups + (in_group > 0 ? 1 : 0));
}

/// One warp learns how the others send; all of the block see it.
__device__ void learn_sources(const RowsParams& p, Sources& sources, std::uint64_t epoch) {
  const MoeShape& s = p.shape;
  for (std::int32_t k = lane_id(); k < s.world_size; k += 32) {
    const std::int32_t r = (s.rank + k) % s.world_size;
    const std::uint64_t seen = await_step(p.m.meet, config_slot(p, s.rank, r),
                                          epoch << stream_config_shift, stream_config_shift, r);
    const auto streams = static_cast<std::int32_t>(seen >> 8 & 0xFFFF);
    const auto group = static_cast<std::int32_t>(seen & 0xFF);
    const std::int32_t tokens = __ldcg(p.num_input_tokens + r);
    sources.streams[r] = streams;
    sources.groups[r] = group;
    sources.tokens[r] = tokens;
    const std::int32_t each = (tokens + streams - 1) / streams;
    sources.units[r] = (each + group - 1) / group * streams;
  }
  __syncwarp();
  if (lane_id() == 0) {
    sources.most_units = 0;
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      sources.most_units = max(sources.most_units, sources.units[r]);
    }
  }
}

/// The weight of one choice, from where its sender left it.
__device__ void take_weight(const RowsParams& p, std::int64_t to, std::int64_t from) {
  if (p.weight_bytes == 4) {
    reinterpret_cast<std::uint32_t*>(p.weights)[to] =
        __ldcg(reinterpret_cast<const std::uint32_t*>(p.sent_weights) + from);
  } else {
    reinterpret_cast<std::uint16_t*>(p.weights)[to] =
        __ldcg(reinterpret_cast<const std::uint16_t*>(p.sent_weights) + from);
  }
}

/// The local expert whose rows, in the grouped order, row `row` is among.
__device__ std::int32_t expert_of(const RowsParams& p, std::int32_t row) {
  std::int32_t low = 0;
  std::int32_t high = p.shape.experts_per_rank;  // offsets[low] <= row < offsets[high]
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    if (__ldg(p.expert_offsets + middle) <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Grouped rows of one token that is here: tables, and the copies of its first row.
template <class Pump>
__device__ void take_grouped(const RowsParams& p, Pump& pump, std::int32_t source,
                             std::int32_t token, std::int32_t row) {
  const MoeShape& s = p.shape;
  const int lane = lane_id();
  const unsigned here = __ballot_sync(all_lanes, row >= 0);
  if (here == 0) return;
  const int first = __ffs(static_cast<int>(here)) - 1;
  const std::int32_t leader = __shfl_sync(all_lanes, row, first);
  const bool fits = row >= 0 && row < s.capacity;
  const bool copies = fits && lane != first && leader < s.capacity;
  if (__any_sync(all_lanes, copies)) {
    std::byte* const window = p.windows[s.rank];
    const PumpSource from{window + std::int64_t{leader} * p.cuts.row_bytes,
                          p.cuts.scale_bytes == 0
                              ? nullptr
                              : window + p.scales_offset + std::int64_t{leader} * p.cuts.scale_bytes};
    const std::int64_t place = copies ? (std::int64_t{s.rank} << place_dst_shift) + row : -1;
    for (std::int32_t piece = 0; piece < p.cuts.pieces; ++piece) pump.push(from, piece, place);
  }
  if (fits) {
    const MoeTag tag{source, token, lane, leader};
    p.tags[row] = tag;
    if (p.sent_weights != nullptr) {
      take_weight(p, row, (std::int64_t{source} * s.max_tokens + token) * s.topk + lane);
    }
    if (p.fills_tables) {
      p.kept_tags[row] = tag;
      p.leader_rows[row] = leader;
    }
  }
  if (!p.fills_tables) return;
  for (unsigned left = __ballot_sync(all_lanes, fits); left != 0; left &= left - 1) {
    const std::int32_t to = __shfl_sync(all_lanes, row, __ffs(static_cast<int>(left)) - 1);
    if (lane < s.topk) p.choice_rows[std::int64_t{to} * s.topk + lane] = to == leader ? row : -1;
  }
}

/// The compact row of one token that is here; `place` of each choice in the grouped order.
__device__ void take_compact(const RowsParams& p, std::int32_t source, std::int32_t token,
                             std::int32_t place, std::int32_t row) {
  const MoeShape& s = p.shape;
  const int lane = lane_id();
  const unsigned here = __ballot_sync(all_lanes, place >= 0);
  if (here == 0 || row >= s.capacity) return;
  const int first = __ffs(static_cast<int>(here)) - 1;
  const MoeTag tag{source, token, first, row};
  if (lane == first) {
    p.tags[row] = tag;
    if (p.fills_tables) p.kept_tags[row] = tag;
  }
  if (lane >= s.topk) return;
  const std::int64_t at = std::int64_t{row} * s.topk + lane;
  const std::int32_t expert = place >= 0 ? expert_of(p, place) : -1;
  p.topk[at] = expert;
  if (p.sent_weights != nullptr) {
    if (place >= 0) {
      take_weight(p, at, (std::int64_t{source} * s.max_tokens + token) * s.topk + lane);
    } else if (p.weight_bytes == 4) {
      reinterpret_cast<std::uint32_t*>(p.weights)[at] = 0;
    } else {
      reinterpret_cast<std::uint16_t*>(p.weights)[at] = 0;
    }
  }
  if (!p.fills_tables) return;
  p.kept_topk[at] = expert;
  p.compact_to_grouped[at] = place;
  if (place >= 0) p.grouped_to_compact[place] = row;
}

/// Takes a group of a stream of `source`, once it has arrived.
template <class Pump>
__device__ void take_unit(const RowsParams& p, Pump& pump, const Sources& sources,
                          std::int32_t source, std::int32_t unit, std::uint64_t epoch) {
  const MoeShape& s = p.shape;
  const std::int32_t streams = sources.streams[source];
  const std::int32_t group = sources.groups[source];
  const std::int32_t tokens = sources.tokens[source];
  const std::int32_t stream = unit % streams;
  const std::int32_t g = unit / streams;
  const std::int32_t begin = stream + g * group * streams;
  if (begin >= tokens) return;
  const std::uint64_t wanted = (epoch << stream_epoch_shift) + static_cast<std::uint64_t>(g) + 1;
  (void)await_step(p.m.meet, stream_slot(p, s.rank, source, stream), wanted, stream_epoch_shift,
                   source);
  __syncwarp();
  pump.expect_arrived();
  const std::int32_t stride = record_stride(s);
  const std::int64_t first = std::int64_t{source} * s.max_tokens;
  const auto record_of = [&](std::int32_t token) {
    return lane_id() < stride && token < tokens
               ? __ldcg(p.records + (first + token) * stride + lane_id())
               : -1;
  };
  std::int32_t next = record_of(begin);
  for (std::int32_t i = 0, token = begin; i < group && token < tokens; ++i, token += streams) {
    const std::int32_t record = next;
    next = record_of(token + streams);
    const std::int64_t at = (first + token) * stride;
    if (p.kept_records != nullptr && lane_id() < stride) {
      p.kept_records[at + lane_id()] = record;
    }
    if (s.compact == 0) {
      take_grouped(p, pump, source, token, record);
      continue;
    }
    const std::int32_t row = __ldcg(p.records + at + s.topk);
    if (p.kept_records != nullptr && lane_id() == 0) p.kept_records[at + s.topk] = row;
    take_compact(p, source, token, lane_id() < s.topk ? record : -1, row);
  }
}

template <class Word>
__device__ void clear_words(std::byte* at, std::int64_t bytes) {
  for (std::int64_t i = lane_id(); i < bytes / static_cast<int>(sizeof(Word)); i += 32) {
    reinterpret_cast<Word*>(at)[i] = Word{};
  }
}

__device__ void clear_bytes(std::byte* at, std::int64_t bytes, int word_bytes) {
  if (word_bytes == 16) {
    clear_words<uint4>(at, bytes);
  } else {
    clear_words<std::uint8_t>(at, bytes);
  }
}

/// Rows between the experts' are zeros, and come from nowhere. A warp each.
__device__ void clear_padding(const RowsParams& p, int warps) {
  const MoeShape& s = p.shape;
  if (s.alignment == 1) return;
  const auto warp = static_cast<std::int32_t>(blockIdx.x) * warps +
                    static_cast<std::int32_t>(threadIdx.x / 32);
  const std::int32_t step = static_cast<std::int32_t>(gridDim.x) * warps;
  for (std::int32_t i = warp; i < s.experts_per_rank * s.alignment; i += step) {
    const std::int32_t e = i / s.alignment;
    const std::int32_t row = p.expert_offsets[e] + p.expert_counts[e] + i % s.alignment;
    if (row >= p.expert_offsets[e + 1]) continue;
    if (s.compact != 0) {
      if (p.fills_tables && lane_id() == 0) p.grouped_to_compact[row] = -1;
      continue;
    }
    if (row >= s.capacity) continue;
    std::byte* const window = p.windows[s.rank];
    clear_bytes(window + std::int64_t{row} * p.cuts.row_bytes, p.cuts.row_bytes, p.cuts.word_bytes);
    clear_bytes(window + p.scales_offset + std::int64_t{row} * p.cuts.scale_bytes,
                p.cuts.scale_bytes, 1);
    if (p.sent_weights != nullptr) {
      clear_bytes(p.weights + std::int64_t{row} * p.weight_bytes, p.weight_bytes, 1);
    }
    if (lane_id() == 0) p.tags[row] = {-1, -1, -1, -1};
    if (!p.fills_tables) continue;
    if (lane_id() == 0) {
      p.kept_tags[row] = {-1, -1, -1, -1};
      p.leader_rows[row] = -1;
    }
    if (lane_id() < s.topk) p.choice_rows[std::int64_t{row} * s.topk + lane_id()] = -1;
  }
}

/// Takes arrived rows piece by piece, whoever comes first: so senders help when they are done.
template <class Pump>
__device__ void receive(const RowsParams& p, Pump& pump, const Sources& sources,
                        std::uint64_t epoch) {
  const MoeShape& s = p.shape;
  const auto claim = [&] {
    std::uint32_t unit = 0;
    if (lane_id() == 0) unit = atomicAdd(&p.m.state->next_unit, 1U);
    return unit;
  };
  const auto total = static_cast<std::uint32_t>(sources.most_units * s.world_size);
  std::uint32_t unit = __shfl_sync(all_lanes, claim(), 0);
  while (unit < total) {
    const std::uint32_t next = claim();
    const auto source = static_cast<std::int32_t>(
        (unit + static_cast<std::uint32_t>(s.rank)) % static_cast<std::uint32_t>(s.world_size));
    const auto number =
        static_cast<std::int32_t>(unit / static_cast<std::uint32_t>(s.world_size));
    if (number < sources.units[source]) take_unit(p, pump, sources, source, number, epoch);
    unit = __shfl_sync(all_lanes, next, 0);
  }
  pump.wait_all();
}

template <class Pump, int Warps>
__global__ void __launch_bounds__(Warps * 32, 1) rows_kernel(const __grid_constant__ RowsParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[Warps][most_pump_stages];
  __shared__ Sources sources;
  const MoeShape& s = p.shape;
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const std::uint64_t epoch = p.m.state->call.epoch;  // the call began with an earlier kernel
  Pump pump(p, shared + warp * p.cuts.stages * p.cuts.stage_bytes, barriers[warp]);
  const std::int32_t senders = p.num_senders * Warps;
  const std::int32_t streams = senders < max_streams ? senders : max_streams;
  if (blockIdx.x == 0 && warp == 0) {
    for (std::int32_t k = lane_id(); k < s.world_size; k += 32) {
      publish(config_slot(p, (s.rank + k) % s.world_size, s.rank),
              stream_config(epoch, streams, p.cuts.group));
    }
  }
  // Neighbouring tokens go to different blocks.
  const std::int32_t stream =
      warp * p.num_senders + static_cast<std::int32_t>(blockIdx.x);
  if (static_cast<std::int32_t>(blockIdx.x) < p.num_senders && stream < streams) {
    send_stream(p, pump, stream, streams, epoch);
  }
  __syncthreads();
  if (warp == 0) learn_sources(p, sources, epoch);
  __syncthreads();
  receive(p, pump, sources, epoch);
  clear_padding(p, Warps);
  if (is_last_block(p.m.meet) && threadIdx.x == 0) {
    p.m.state->call.blocks = 0;
    p.m.state->next_unit = 0;
  }
}

constexpr int most_shared_bytes = 227 * 1024 - 6 * 1024;

}  // namespace

RowCuts cut_rows(std::int64_t row_bytes, std::int32_t scale_bytes, bool bulk, int word_bytes) {
  constexpr int room = most_shared_bytes / pump_warps;
  constexpr std::int64_t most_piece = 14336;
  RowCuts cuts{};
  cuts.row_bytes = row_bytes;
  cuts.scale_bytes = scale_bytes;
  cuts.word_bytes = word_bytes;
  cuts.pieces = 1;
  cuts.piece_bytes = static_cast<std::int32_t>(row_bytes);
  cuts.stages = 2;
  cuts.group = 4;
  if (!bulk) return cuts;
  const std::int64_t fits = std::int64_t{room} / 2 - 256 - scale_bytes - 128;
  const std::int64_t piece = fits < most_piece ? fits / 128 * 128 : most_piece;
  cuts.pieces = static_cast<std::int32_t>((row_bytes + piece - 1) / piece);
  cuts.piece_bytes =
      static_cast<std::int32_t>((row_bytes + cuts.pieces - 1) / cuts.pieces + 15) / 16 * 16;
  cuts.stage_bytes = static_cast<std::int32_t>(
      (static_cast<int>(sizeof(PumpStage)) + cuts.piece_bytes + scale_bytes + 127) / 128 * 128);
  const int stages = room / cuts.stage_bytes;
  cuts.stages = stages < most_pump_stages ? stages : most_pump_stages;
  const int pushes = cuts.stages - 1 + 3;  // see BulkPump::wait_earlier
  const int tokens = (pushes + cuts.pieces - 1) / cuts.pieces;
  if (tokens > cuts.group) cuts.group = tokens;
  return cuts;
}

cudaError_t prepare_rows(bool bulk) {
  if (!bulk) {
    cudaFuncAttributes unused{};
    return cudaFuncGetAttributes(&unused, rows_kernel<VectorPump, vector_warps>);
  }
  return cudaFuncSetAttribute(rows_kernel<BulkPump, pump_warps>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared_bytes);
}

cudaError_t launch_rows(const RowsParams& params, bool bulk, int blocks, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(blocks);
  if (bulk) {
    const auto bytes = static_cast<std::size_t>(pump_warps) *
                       static_cast<std::size_t>(params.cuts.stages) *
                       static_cast<std::size_t>(params.cuts.stage_bytes);
    rows_kernel<BulkPump, pump_warps><<<grid, pump_warps * 32, bytes, stream>>>(params);
  } else {
    rows_kernel<VectorPump, vector_warps><<<grid, vector_warps * 32, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace waybill::cuda
