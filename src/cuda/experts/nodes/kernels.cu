#include <algorithm>

#include "../../device/number.cuh"
#include "../../device/word_copy.cuh"
#include "../call.cuh"
#include "nodes.h"

namespace waybill::cuda {

// The program of a network path: what a call of experts sends to other nodes.

namespace {

constexpr int list_warps = 8;

__device__ std::int32_t peer_on(const MoeShape& s, std::int32_t node) {
  return node * s.node_ranks + s.rank - s.first_rank;
}
/// The node that comes k + 1 places after this one, in a ring.
__device__ std::int32_t other_node(const MoeShape& s, std::int32_t k) {
  return (own_node(s) + 1 + k) % s.num_nodes;
}

/// Whether a token has a topk slot on the wanted node.
/// @param writes_ids writes the ids as other nodes read them
__device__ bool goes(const ListPutsParams& p, std::int32_t node, std::int32_t token,
                     bool writes_ids) {
  const MoeShape& s = p.shape;
  if (token >= s.max_tokens) return false;
  const bool partial_sums = p.filter == NodeFilter::partial_sums;
  const std::int32_t wanted = partial_sums ? own_node(s) : node;
  const std::int64_t slice = partial_sums ? std::int64_t{node} * s.max_tokens : 0;
  bool result = false;
  bool bad = false;
  for (std::int32_t k = 0; k < s.topk; ++k) {
    const std::int64_t i = (slice + token) * s.topk + k;
    std::int32_t id = -1;
    if (p.made_ids != nullptr) {
      id = id_to_send(s, p.given_ids, p.wide_ids, p.dropped_id, i, bad);
    } else if (p.ids != nullptr) {
      id = p.ids[i];
    }
    if (writes_ids) p.made_ids[i] = id;
    result |= id >= 0 && id / (s.experts_per_rank * s.node_ranks) == wanted;
  }
  if (bad && writes_ids) {
    report_bad_id(BadIds{s, p.given_ids, p.wide_ids, p.dropped_id}, p.m.arrive.sink, p.m.state);
  }
  return result;
}

__device__ NetworkPut put_of(const NodePart& part, std::int32_t node, std::int64_t offset,
                             std::int64_t size_bytes) {
  NetworkPut put{};
  put.from_bytes = part.from + node * part.from_node_bytes + offset;
  put.to_bytes = part.to + offset;
  put.size_bytes = size_bytes;
  return put;
}

/// Number of puts that carry whole parts to one other node. There is at least one, because its
/// arrival is signalled.
__device__ std::int32_t whole_puts(const ListPutsParams& p) {
  std::int32_t puts = 0;
  for (std::int32_t i = 0; i < p.num_whole; ++i) {
    puts += static_cast<std::int32_t>((p.whole[i].total_bytes + max_put_bytes - 1) / max_put_bytes);
  }
  return puts == 0 ? 1 : puts;
}

/// Writes the step with the whole parts for other node k. One thread.
__device__ void list_whole(const ListPutsParams& p, std::int32_t k) {
  const std::int32_t node = other_node(p.shape, k);
  const std::int32_t peer = peer_on(p.shape, node);
  const std::int32_t count = whole_puts(p);
  const std::int32_t first = k * count;
  std::int32_t at = first;
  p.puts[first] = put_of(p.whole[0], node, 0, 0);
  p.puts[first].peer = peer;
  p.puts[first].step = k;
  for (std::int32_t i = 0; i < p.num_whole; ++i) {
    for (std::int64_t offset = 0; offset < p.whole[i].total_bytes; offset += max_put_bytes) {
      const std::int64_t left = p.whole[i].total_bytes - offset;
      NetworkPut put =
          put_of(p.whole[i], node, offset, left < max_put_bytes ? left : max_put_bytes);
      put.peer = peer;
      put.step = k;
      p.puts[at++] = put;
    }
  }
  p.steps[k] = {0, 0, first, count, k, 1};
  p.signals[k] = {peer, p.whole_slot + own_node(p.shape)};
}

/// The counter that says that the partial sum of a token is made.
__device__ std::int32_t ready_of(const ListPutsParams& p, std::int32_t k, std::int32_t token) {
  if (p.ready_pieces > 0) return k * p.ready_pieces + token / p.piece_tokens;
  return other_node(p.shape, k) > own_node(p.shape) ? 0 : 1;
}

/// Writes the steps with 32 tokens for other node k. One warp.
__device__ void list_chunks(const ListPutsParams& p, std::int32_t k, std::int32_t first) {
  const MoeShape& s = p.shape;
  const std::int32_t node = other_node(s, k);
  const std::int32_t peer = peer_on(s, node);
  const bool going = goes(p, node, first + lane_id(), p.made_ids != nullptr && k == 0);
  const unsigned tokens = __ballot_sync(all_lanes, going);
  if (p.filter == NodeFilter::none) return;
  // Each run of tokens becomes a put, and ends with its chunk.
  const int in_chunk = lane_id() & ((1 << p.chunk_shift) - 1);
  const unsigned edges = __ballot_sync(all_lanes, in_chunk == 0);
  const unsigned starts = tokens & (~(tokens << 1U) | edges);
  const std::int32_t chunk = (first + lane_id()) >> p.chunk_shift;
  if (chunk >= p.num_chunks) return;
  const unsigned of_chunk = (p.chunk_shift == 5 ? all_lanes : (1U << (1 << p.chunk_shift)) - 1)
                            << (lane_id() - in_chunk);
  const bool has_whole = p.num_whole > 0;
  const std::int32_t before = has_whole ? s.num_nodes - 1 : 0;
  const std::int32_t number = k * p.num_chunks + chunk;
  const std::int32_t step = before + number;
  const std::int32_t first_put = before * whole_puts(p) + (number << p.chunk_shift) * p.num_parts;
  if (in_chunk == 0) {
    const bool waits = p.filter == NodeFilter::partial_sums;
    p.steps[step] = {step, waits ? 1 : 0, first_put, __popc(starts & of_chunk) * p.num_parts, step,
                     1};
    if (waits) p.waits[step] = {s.world_size, ready_of(p, k, first + lane_id())};
    p.signals[step] = {peer, p.chunk_slot + own_node(s) * p.num_chunks + chunk};
  }
  if ((starts >> lane_id() & 1U) == 0) return;
  // Length of the put: up to the next token that begins a put or does not go.
  const unsigned rest = lane_id() == 31 ? 0 : (starts | ~tokens) >> (lane_id() + 1);
  const int length = rest == 0 ? 32 - lane_id() : __ffs(static_cast<int>(rest));
  const int nth = __popc(starts & of_chunk & ((1U << lane_id()) - 1));
  for (std::int32_t i = 0; i < p.num_parts; ++i) {
    const std::int64_t row_bytes = p.parts[i].row_bytes;
    NetworkPut put = put_of(p.parts[i], node, (first + lane_id()) * row_bytes, length * row_bytes);
    put.peer = peer;
    put.step = step;
    p.puts[first_put + nth * p.num_parts + i] = put;
  }
}

/// Announces the call. Only the first block calls it.
__device__ void begin_path(const ListPutsParams& p) {
  const std::uint64_t epoch =
      p.begins >= 0 ? begin_moe_call(p.m, p.begins) : p.m.state->call.epoch + (p.is_open ? 1 : 0);
  if (p.begins >= 0 && threadIdx.x < 32) signal_to_all(p.m.arrive, epoch);
  if (threadIdx.x == 0)
    p.state->epoch = epoch - 1;  // the path counts up to the number of the
                                 // call
}

__global__ void __launch_bounds__(list_warps * 32)
    list_puts_kernel(const __grid_constant__ ListPutsParams p) {
  const MoeShape& s = p.shape;
  if (blockIdx.x == 0) begin_path(p);
  const std::int32_t others = s.num_nodes - 1;
  if (p.num_whole > 0 && blockIdx.x == 0) {
    for (auto k = static_cast<std::int32_t>(threadIdx.x); k < others; k += list_warps * 32)
      list_whole(p, k);
  }
  const std::int32_t stretches = (s.max_tokens + 31) / 32;
  const auto warp = static_cast<std::int32_t>(blockIdx.x * list_warps + threadIdx.x / 32);
  const auto step = static_cast<std::int32_t>(gridDim.x) * list_warps;
  for (std::int32_t i = warp; i < others * stretches; i += step)
    list_chunks(p, i / stretches, i % stretches * 32);
}

__global__ void __launch_bounds__(32)
    raise_ready_kernel(const __grid_constant__ MoeArrive m, std::uint64_t* ready) {
  end_if_reported(m.arrive.sink);
  if (threadIdx.x == 0) signal(ready, m.state->call.epoch + 1);
}

__global__ void __launch_bounds__(32) wait_nodes_kernel(const __grid_constant__ WaitNodesParams p) {
  const MoeShape& s = p.shape;
  end_if_reported(p.m.arrive.sink);
  const std::uint64_t epoch = p.m.state->call.epoch + (p.begins >= 0 ? 1 : 0);
  if (p.of_node) {
    for (std::int32_t k = 1 + lane_id(); k < s.node_ranks; k += 32) {
      const std::int32_t peer = node_rank_after(p.m.arrive, k);
      wait_slot(p.m.arrive, p.m.arrive.own_arrivals + peer, epoch, peer);
    }
  } else if (p.begins >= 0) {
    wait_all(p.m.arrive, epoch);
  }
  for (std::int32_t k = lane_id(); k < s.num_nodes - 1 && p.slots != nullptr; k += 32) {
    const std::int32_t node = other_node(s, k);
    wait_slot(p.m.arrive, p.slots + std::int64_t{node} * p.node_stride, epoch, peer_on(s, node));
  }
  __syncwarp();
  if (p.counts && threadIdx.x == 0) end_moe_call(p.m, p.begins, epoch);
}

}  // namespace

cudaError_t launch_list_puts(const ListPutsParams& params, cudaStream_t stream) {
  constexpr std::int32_t max_blocks = 128;
  const MoeShape& s = params.shape;
  const bool lists = params.filter != NodeFilter::none || params.made_ids != nullptr;
  const std::int32_t stretches = lists ? (s.num_nodes - 1) * ((s.max_tokens + 31) / 32) : 1;
  const std::int32_t blocks = std::min(max_blocks, (stretches + list_warps - 1) / list_warps);
  list_puts_kernel<<<static_cast<unsigned>(std::max(1, blocks)), list_warps * 32, 0, stream>>>(
      params);
  return cudaGetLastError();
}

cudaError_t launch_raise_ready(const MoeArrive& arrive, std::uint64_t* ready, cudaStream_t stream) {
  raise_ready_kernel<<<1, 32, 0, stream>>>(arrive, ready);
  return cudaGetLastError();
}

cudaError_t launch_wait_nodes(const WaitNodesParams& params, cudaStream_t stream) {
  wait_nodes_kernel<<<1, 32, 0, stream>>>(params);
  return cudaGetLastError();
}

// Lists of rows that cross between nodes, and copies of these rows to the front of a slice and
// back.

namespace {

constexpr int list_threads = 1024;
constexpr int move_warps = 8;

__device__ bool has_slot_on(const MoeShape& s, const std::int32_t* ids, std::int32_t node) {
  bool result = false;
  for (std::int32_t k = 0; k < s.topk; ++k)
    result |= ids[k] >= 0 && ids[k] / (s.experts_per_rank * s.node_ranks) == node;
  return result;
}

/// Lists tokens. Each block takes one direction and node, and each thread one token at a time.
__global__ void __launch_bounds__(list_threads)
    node_rows_kernel(const __grid_constant__ NodeRowsParams p) {
  __shared__ std::int32_t of_warps[list_threads / 32];
  const MoeShape& s = p.shape;
  const auto i = static_cast<std::int32_t>(threadIdx.x);
  const auto node = static_cast<std::int32_t>(blockIdx.y);
  const bool comes = blockIdx.x == 1;
  const std::int32_t own = own_node(s);
  const std::int32_t slice = comes ? node : own;
  const std::int32_t wanted = comes ? own : node;
  const std::int64_t which = std::int64_t{blockIdx.x} * s.num_nodes + node;
  std::int32_t* const tokens = p.tokens + which * s.max_tokens;
  std::int32_t count = 0;
  for (std::int32_t first = 0; first < s.max_tokens && node != own; first += list_threads) {
    const std::int32_t token = first + i;
    const bool goes =
        token < s.max_tokens &&
        has_slot_on(s, p.ids + (std::int64_t{slice} * s.max_tokens + token) * s.topk, wanted);
    const unsigned lanes = __ballot_sync(all_lanes, goes);
    if (lane_id() == 0) of_warps[i / 32] = __popc(lanes);
    __syncthreads();
    std::int32_t before = count;
    for (int w = 0; w < list_threads / 32; ++w) {
      if (w < i / 32) before += of_warps[w];
      count += of_warps[w];
    }
    if (goes) tokens[before + __popc(lanes & ((1U << lane_id()) - 1))] = token;
    __syncthreads();
  }
  if (i != 0) return;
  p.counts[which] = count;
  p.host[which] = p.ticket << ticket_shift | static_cast<std::uint32_t>(count);
}

/// Each warp moves one row at a time.
template <class Word>
__global__ void __launch_bounds__(move_warps * 32)
    move_node_rows_kernel(const __grid_constant__ MoveNodeRowsParams p) {
  constexpr int batch = 4;
  const auto words = static_cast<std::int32_t>(p.row_bytes / static_cast<int>(sizeof(Word)));
  const auto warp = static_cast<std::int32_t>(blockIdx.x * move_warps + threadIdx.x / 32);
  const auto warps = static_cast<std::int32_t>(gridDim.x) * move_warps;
  for (std::int32_t node = 0; node < p.shape.num_nodes; ++node) {
    const std::int32_t* const tokens = p.tokens + std::int64_t{node} * p.shape.max_tokens;
    const std::int32_t count = p.counts[node];
    for (std::int32_t i = warp; i < count; i += warps) {
      const std::int64_t token = tokens[i];
      const auto* const from = reinterpret_cast<const Word*>(p.from + node * p.from_node_bytes +
                                                             (p.packs ? token : i) * p.row_bytes);
      auto* const to = reinterpret_cast<Word*>(p.to + node * p.to_node_bytes +
                                               (p.packs ? i : token) * p.row_bytes);
      for (std::int32_t w = lane_id(); w < words; w += 32 * batch) {
        Word some[batch];
        load_batch<32>(some, from, w, words);
        store_batch<32>(to, some, w, words);
      }
    }
  }
}

using MoveKernel = void (*)(MoveNodeRowsParams);

MoveKernel move_kernel(int word_bytes) {
  return for_word(word_bytes,
                  []<class Word>(Word) -> MoveKernel { return move_node_rows_kernel<Word>; });
}

}  // namespace

cudaError_t launch_node_rows(const NodeRowsParams& params, cudaStream_t stream) {
  const dim3 grid(2, static_cast<unsigned>(params.shape.num_nodes));
  node_rows_kernel<<<grid, list_threads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_move_node_rows(const MoveNodeRowsParams& params, int word_bytes, int blocks,
                                  cudaStream_t stream) {
  move_kernel(word_bytes)<<<static_cast<unsigned>(blocks), move_warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

// Tables of several nodes, and the sum of their partial sums.

namespace {

constexpr int warps = 16;
constexpr int tile_tokens = 256;  ///< runs end at its edges

/// Number of set bits before bit `i` of a tile.
__device__ int bits_before(const unsigned (&words)[tile_tokens / 32], int i) {
  int count = __popc(words[i / 32] & ((1U << (i % 32)) - 1));
  for (int w = 0; w < i / 32; ++w) count += __popc(words[w]);
  return count;
}

/// Each block takes one tile of one node's tokens, and each thread one token.
__global__ void __launch_bounds__(tile_tokens)
    node_runs_kernel(MoeShape s, const std::int32_t* all_ids, std::int32_t* runs) {
  __shared__ unsigned going[tile_tokens / 32];
  __shared__ unsigned starting[tile_tokens / 32];
  __shared__ unsigned ending[tile_tokens / 32];
  const auto node = static_cast<std::int32_t>(blockIdx.y);
  const std::int32_t own = own_node(s);
  const auto i = static_cast<int>(threadIdx.x);
  const auto first = static_cast<std::int32_t>(blockIdx.x) * tile_tokens;
  const std::int32_t token = first + i;
  const std::int64_t from_node = std::int64_t{node} * s.max_tokens;
  std::int32_t* const starts = runs + 2 * from_node;
  std::int32_t* const ends = starts + s.max_tokens;
  bool goes = false;
  if (token < s.max_tokens) {
    starts[token] = -1;
    ends[token] = -1;
    const std::int32_t* const ids = all_ids + (from_node + token) * s.topk;
    for (std::int32_t k = 0; k < s.topk && node != own; ++k) {
      goes |= ids[k] >= 0 && ids[k] / (s.experts_per_rank * s.node_ranks) == own;
    }
  }
  const auto note = [&](unsigned* words, bool bit) {
    const unsigned bits = __ballot_sync(all_lanes, bit);
    if (lane_id() == 0) words[i / 32] = bits;
    __syncthreads();
  };
  const auto goes_at = [&](int at) { return (going[at / 32] >> (at % 32) & 1U) != 0; };
  note(going, goes);
  const bool starts_here = goes && (i == 0 || !goes_at(i - 1));
  const bool ends_here = goes && (i == tile_tokens - 1 || !goes_at(i + 1));
  note(starting, starts_here);
  note(ending, ends_here);
  if (starts_here) starts[first + bits_before(starting, i)] = token;
  if (ends_here) ends[first + bits_before(ending, i)] = token + 1;
}

/// Waits until a node's token has arrived. One warp, whose lanes ask for the same token.
/// @param s shape of the world
__device__ void wait_chunk(const ArriveParams& arrive, const MoeShape& s, const ChunkSlots& slots,
                           std::int32_t node, std::int32_t token, std::uint64_t epoch) {
  if (threadIdx.x % 32 == 0) {
    const std::int32_t peer = node * s.node_ranks + s.rank - s.first_rank;
    wait_slot(arrive, slot_of_token(slots, node, token), epoch, peer);
  }
  __syncwarp();
}

/// Each warp takes 64 packs of one token at a time.
template <class Number, int Count>
__global__ void __launch_bounds__(warps * 32)
    add_partial_sums_kernel(const __grid_constant__ AddPartialSumsParams p) {
  using Packed = Pack<Number, Count>;
  const MoeShape& s = p.shape;
  const auto packs = static_cast<std::int32_t>(p.row_bytes / static_cast<int>(sizeof(Packed)));
  const std::int32_t stretches = (packs + 63) / 64;
  const std::int64_t items = std::int64_t{s.num_tokens} * stretches;
  const std::int32_t own = own_node(s);
  end_if_reported(p.m.arrive.sink);
  const std::uint64_t epoch = p.m.state->call.epoch;
  for (std::int64_t item = blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x; item < items;
       item += std::int64_t{gridDim.x} * warps) {
    const std::int64_t token = item / stretches;
    const auto first = static_cast<std::int32_t>(item % stretches) * 64 + lane_id();
    std::int32_t goes_to = -1;
    if (lane_id() < s.topk) {
      const std::int32_t id = p.ids[token * s.topk + lane_id()];
      if (0 <= id && id < s.num_experts) goes_to = id / (s.experts_per_rank * s.node_ranks);
    }
    float sums[2][Count] = {};
    const auto add = [&](const std::byte* rows, std::int64_t row) {
      const auto* const from = reinterpret_cast<const Packed*>(rows + row * p.row_bytes);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if (first + u * 32 >= packs) continue;
        const Packed packed = from[first + u * 32];
#pragma unroll
        for (int e = 0; e < Count; ++e) {
          sums[u][e] = __fadd_rn(sums[u][e], Number::load(packed.values[e]));
        }
      }
    };
    for (const std::byte* bias : p.biases) {
      if (bias != nullptr) add(bias, token);
    }
    for (std::int32_t node = 0; node < s.num_nodes; ++node) {
      if (!__any_sync(all_lanes, goes_to == node)) continue;
      if (node == own) {
        add(p.own_sums, token);
      } else {
        wait_chunk(p.m.arrive, s, p.arrived, node, static_cast<std::int32_t>(token), epoch);
        add(p.partial_sums, std::int64_t{node} * s.max_tokens + token);
      }
    }
    auto* const to = reinterpret_cast<Packed*>(p.output + token * p.row_bytes);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (first + u * 32 >= packs) continue;
      Packed packed;
#pragma unroll
      for (int e = 0; e < Count; ++e) packed.values[e] = Number::round(sums[u][e]);
      to[first + u * 32] = packed;
    }
  }
}

using AddKernel = void (*)(AddPartialSumsParams);

AddKernel add_kernel(DType dtype, bool wide) {
  return for_number(dtype, [&]<class Number>(Number) -> AddKernel {
    constexpr int wide_count = 16 / static_cast<int>(sizeof(typename Number::Stored));
    return wide ? add_partial_sums_kernel<Number, wide_count> : add_partial_sums_kernel<Number, 1>;
  });
}

}  // namespace

cudaError_t prepare_nodes(DType tokens) {
  for (const int word : {16, 8, 4, 2, 1}) {
    const cudaError_t status = load_kernels(move_kernel(word));
    if (status != cudaSuccess) return status;
  }
  return load_kernels(list_puts_kernel, raise_ready_kernel, wait_nodes_kernel, node_rows_kernel,
                      node_runs_kernel, add_kernel(tokens, false), add_kernel(tokens, true));
}

cudaError_t launch_node_runs(const MoeShape& shape, const std::int32_t* ids, std::int32_t* runs,
                             cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((shape.max_tokens + tile_tokens - 1) / tile_tokens),
                  static_cast<unsigned>(shape.num_nodes));
  node_runs_kernel<<<grid, tile_tokens, 0, stream>>>(shape, ids, runs);
  return cudaGetLastError();
}

cudaError_t launch_add_partial_sums(const AddPartialSumsParams& params, DType dtype, bool wide,
                                    int blocks, cudaStream_t stream) {
  const AddKernel kernel = add_kernel(dtype, wide);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
