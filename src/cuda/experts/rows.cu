#include "arrived.cuh"
#include "early.h"
#include "expert_launch.h"
#include "landing.cuh"

namespace waybill::cuda {
namespace {

constexpr int vector_warps = 16;
constexpr int taker_warps = 5;  // beside pump_warps

/// Several nodes: waits until the tokens of a node are here. One warp. @return the node
template <class Pump>
__device__ std::int32_t await_node(const RowsParams& p, const Pump& pump, std::int32_t node,
                                   std::uint64_t epoch) {
  const std::int32_t peer = node * p.shape.node_ranks + p.shape.rank;
  if (lane_id() == 0 && peer != p.m.meet.rank) {
    await_slot(p.m.meet, p.forwarded + peer, epoch, peer);
  }
  __syncwarp();
  pump.expect_arrived();
  return node;
}

/// Sends the tokens stream, stream + streams, ..., each once to every rank that it goes to.
template <class Pump>
__device__ void send_stream(const RowsParams& p, Pump& pump, std::int32_t stream,
                            std::int32_t streams, CallBegin& begin) {
  const MoeShape& s = p.shape;
  const bool lands = p.ahead == Ahead::lands;
  const auto place_of = [&](std::int32_t position) -> std::int64_t {
    if (position >= s.num_tokens) return -1;
    if (lands) return landing_place(p, position);
    return lane_id() < s.topk ? p.places[std::int64_t{token_at(s, position)} * s.topk + lane_id()]
                              : -1;
  };
  std::int32_t in_group = 0;
  std::int32_t groups = 0;
  bool skipped = false;    // since groups were published
  std::int32_t here = -1;  // node whose tokens are here
  std::int64_t next = place_of(stream);
  for (std::int32_t i = stream; i < s.num_tokens; i += streams) {
    const std::int32_t t = token_at(s, i);
    const bool sends =
        next >= 0 && (next & place_leader_bit) != 0 && (lands || (next & 0xFFFFFFFF) < s.capacity);
    const std::int64_t place = sends ? next & ~place_leader_bit : -1;
    next = place_of(i + streams);
    const PumpSource from{
        p.tokens + std::int64_t{t} * p.cuts.row_bytes,
        p.scales == nullptr ? nullptr : p.scales + std::int64_t{t} * p.cuts.scale_bytes};
    // On several nodes many a token has nothing here, or does not exist.
    if (s.num_nodes > 1 && __ballot_sync(all_lanes, place >= 0) == 0) {
      skipped = true;
    } else {
      if (s.num_nodes > 1) {
        const std::int32_t node = t / (s.max_tokens / s.num_nodes);
        if (node != here) here = await_node(p, pump, node, begin.await());
      }
      for (std::int32_t piece = 0; piece < p.cuts.pieces; ++piece) pump.push(from, piece, place);
    }
    if (++in_group < p.cuts.group) continue;
    in_group = 0;
    ++groups;
    if (skipped) {  // too few pushes for what wait_earlier says
      pump.wait_all();
      publish_groups(p, stream, begin.epoch(), groups);
      skipped = false;
    } else if (groups > 1) {
      pump.wait_earlier();
      publish_groups(p, stream, begin.epoch(), groups - 1);
    }
  }
  pump.wait_all();
  if (groups + in_group == 0) return;
  publish_groups(p, stream, begin.epoch(), groups + (in_group > 0 ? 1 : 0));
}

/// Copies the tokens of the round to the rows where they are not yet: from the landing to all, from
/// a token's first row to its further ones. @param row of the token, where rows are compact
template <class Pump>
__device__ void copy_rows(const RowsParams& p, Pump& pump, const Arrived& a, bool landed,
                          std::int32_t row) {
  const MoeShape& s = p.shape;
  const bool compact = s.compact != 0;
  const std::int64_t place = compact ? row : a.place;
  bool copies = a.place >= 0 && place < s.capacity;
  if (compact) {
    copies = copies && landed && leads(a);
  } else if (!landed) {
    copies = copies && !leads(a) && a.leader < s.capacity;
  }
  const std::int64_t to = (std::int64_t{s.rank} << place_dst_shift) + place;
  const std::byte* const window = p.windows[s.rank];
  unsigned left = __ballot_sync(all_lanes, copies);
  while (left != 0) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t leader = __shfl_sync(all_lanes, a.leader, lane);
    const std::int32_t token = __shfl_sync(all_lanes, a.token, lane);
    const unsigned of_token = __shfl_sync(all_lanes, a.here, lane);
    const PumpSource first{
        window + leader * p.cuts.row_bytes,
        p.cuts.scale_bytes == 0 ? nullptr : window + p.scales_offset + leader * p.cuts.scale_bytes};
    const PumpSource from = landed ? landed_row(p, a.source, token) : first;
    const bool mine = copies && (of_token >> lane_id() & 1U) != 0;
    for (std::int32_t piece = 0; piece < p.cuts.pieces; ++piece) {
      pump.push(from, piece, mine ? to : -1);
    }
    left &= ~of_token;
  }
}

/// Takes some tokens of a group: a lane a choice.
template <class Pump>
__device__ void take_round(const RowsParams& p, Pump& pump, const Source& source,
                           std::int32_t token, bool active) {
  const MoeShape& s = p.shape;
  const std::int32_t k = lane_id() % s.topk;
  const std::int64_t at = (std::int64_t{source.rank} * s.max_tokens + token) * record_stride(s);
  Arrived a{source.rank, token, k, -1, 0, -1};
  std::int32_t row = -1;
  if (active) {
    a.place = __ldcg(p.records + at + k);
    if (s.compact != 0) row = __ldcg(p.records + at + s.topk);
    if (p.kept_records != nullptr) {
      p.kept_records[at + k] = a.place;
      if (s.compact != 0 && k == 0) p.kept_records[at + s.topk] = row;
    }
  }
  a.here = __ballot_sync(all_lanes, a.place >= 0) & lanes_of_token(s.topk, k);
  const int first = a.here == 0 ? lane_id() : __ffs(static_cast<int>(a.here)) - 1;
  a.leader = __shfl_sync(all_lanes, a.place, first);
  if constexpr (Pump::copies) copy_rows(p, pump, a, source.lands, row);
  if (s.compact == 0) {
    note_grouped(p, a);
  } else if (active) {
    note_compact(p, a, row);
  }
}

/// Takes a group of a stream of `source`, once it has arrived.
template <class Pump>
__device__ void take_unit(const RowsParams& p, Pump& pump, const Source& source, std::int32_t unit,
                          std::uint64_t epoch) {
  const std::int32_t stream = unit % source.streams;
  const std::int32_t g = unit / source.streams;
  const std::int32_t begin = stream + g * source.group * source.streams;
  if (begin >= source.tokens) return;
  const std::uint64_t wanted = (epoch << stream_epoch_shift) + static_cast<std::uint64_t>(g) + 1;
  (void)await_step(p.m.meet, stream_slot(p, p.shape.rank, source.rank, stream), wanted,
                   stream_epoch_shift, p.shape.first_rank + source.rank);
  __syncwarp();
  pump.expect_arrived();
  const std::int32_t together = 32 / p.shape.topk;
  const std::int32_t mine = lane_id() / p.shape.topk;
  for (std::int32_t i = 0; i < source.group && begin + i * source.streams < source.tokens;
       i += together) {
    const std::int32_t position = begin + (i + mine) * source.streams;
    const bool active = mine < together && i + mine < source.group && position < source.tokens;
    take_round(p, pump, source, token_at(p.shape, position), active);
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
  const auto warp =
      static_cast<std::int32_t>(blockIdx.x) * warps + static_cast<std::int32_t>(threadIdx.x / 32);
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
      p.primary_rows[row] = -1;
    }
    if (lane_id() < s.topk) p.topk_slot_rows[std::int64_t{row} * s.topk + lane_id()] = -1;
  }
}

/// Takes arrived rows piece by piece, whoever comes first: so senders help when they are done.
template <class Pump>
__device__ void receive(const RowsParams& p, Pump& pump, CallBegin& begin) {
  const auto world = static_cast<std::uint32_t>(p.shape.world_size);
  const auto claim = [&] {
    std::uint32_t unit = 0;
    if (lane_id() == 0) unit = atomicAdd(&p.m.state->next_unit, 1U);
    return unit;
  };
  const std::uint64_t epoch = begin.epoch();
  std::uint32_t unit = Pump::copies ? claim() : 0;  // on its way while others are waited for
  const Sources sources = learn_sources(p, begin);
  if constexpr (!Pump::copies) {
    if (sources.some_land) return;
    unit = claim();
  }
  const std::uint32_t total = static_cast<std::uint32_t>(sources.most_units) * world;
  unit = __shfl_sync(all_lanes, unit, 0);
  while (unit < total) {
    const std::uint32_t next = claim();
    const auto rank =
        static_cast<std::int32_t>((unit + static_cast<std::uint32_t>(p.shape.rank)) % world);
    take_unit(p, pump, source_of(sources, rank), static_cast<std::int32_t>(unit / world), epoch);
    unit = __shfl_sync(all_lanes, next, 0);
  }
  pump.wait_all();
}

/// For warps that only fill tables.
struct NoPump {
  static constexpr bool copies = false;
  __device__ void expect_arrived() const {}
  __device__ void wait_all() const {}
};

/// All ranks report the same.
__device__ void report_overflow(const RowsParams& p, std::uint64_t epoch) {
  const std::int32_t rows = __ldcg(p.most_recv_rows);
  if (rows <= p.shape.capacity || rows <= static_cast<std::int32_t>(p.faults->overflow)) return;
  p.faults->overflow = epoch << overflow_epoch_shift | static_cast<std::uint32_t>(rows);
}

/// Tells all ranks how this one sends. One warp.
__device__ void tell_streams(const RowsParams& p, std::int32_t streams, std::uint64_t epoch) {
  for (std::int32_t k = lane_id(); k < p.shape.world_size; k += 32) {
    publish(config_slot(p, (p.shape.rank + k) % p.shape.world_size, p.shape.rank),
            stream_config(epoch, streams, p.cuts.group, p.ahead == Ahead::lands));
  }
}

/// A block has `Movers` warps that send and copy rows. `Takers` more fill the tables of compact
/// rows, which are not copied, while the others send.
template <class Pump, int Movers, int Takers>
__global__ void __launch_bounds__((Movers + Takers) * 32, 1)
    rows_kernel(const __grid_constant__ RowsParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[Movers][most_pump_stages];
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  CallBegin begin(p);  // with an earlier kernel
  linger_block(p.m);
  const std::int32_t most = min(p.num_senders * Movers, max_streams);
  const std::int32_t streams = max(1, min(most, p.shape.num_tokens));
  // Who sends ahead must not wait here: only bulk copies do, and there a taker is the last.
  if (p.ahead == Ahead::nothing) (void)begin.await();
  if (block == 0 && warp == Movers + Takers - 1) {
    tell_streams(p, streams, begin.epoch());
  }
  if (warp < Movers) {
    Pump pump(p, begin, shared + warp * p.cuts.stages * p.cuts.stage_bytes, barriers[warp]);
    // Neighbouring tokens go to different blocks.
    const std::int32_t stream = warp * p.num_senders + block;
    if (block < p.num_senders && stream < streams) send_stream(p, pump, stream, streams, begin);
    pump.leave_landings();
    receive(p, pump, begin);
  } else if (p.shape.compact != 0) {
    NoPump pump;
    receive(p, pump, begin);
  }
  const std::uint64_t epoch = begin.await();
  clear_padding(p, Movers + Takers);
  if (comes_last(p.m.state)) {
    report_overflow(p, epoch);
    p.m.state->call.blocks = 0;
    p.m.state->next_unit = 0;
    p.m.state->begun = 0;
  }
}

constexpr auto bulk_kernel = rows_kernel<BulkPump, pump_warps, taker_warps>;
constexpr auto vector_kernel = rows_kernel<VectorPump, vector_warps, 0>;

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
    return cudaFuncGetAttributes(&unused, vector_kernel);
  }
  return cudaFuncSetAttribute(bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              most_shared_bytes);
}

cudaError_t launch_rows(const RowsParams& params, const RowsLaunch& how, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(how.blocks);
  if (!how.bulk) {
    return launch_kernel(vector_kernel, blocks, vector_warps * 32, 0, false, stream, params);
  }
  const auto shared =
      static_cast<std::size_t>(pump_warps * params.cuts.stages * params.cuts.stage_bytes);
  return launch_kernel(bulk_kernel, blocks, (pump_warps + taker_warps) * 32, shared, how.early,
                       stream, params);
}

}  // namespace waybill::cuda
