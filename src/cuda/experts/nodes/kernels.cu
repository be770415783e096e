// What crosses between nodes in a call of experts, as a program for the network path.

#include <algorithm>

#include "../call.cuh"
#include "../nodes_launch.h"

namespace waybill::cuda {
namespace {

constexpr int list_warps = 8;

__device__ std::int32_t own_node(const MoeShape& s) { return s.first_rank / s.node_ranks; }
__device__ std::int32_t peer_on(const MoeShape& s, std::int32_t node) {
  return node * s.node_ranks + s.rank - s.first_rank;
}
/// Other node `k` of those from the next one on.
__device__ std::int32_t other_node(const MoeShape& s, std::int32_t k) {
  return (own_node(s) + 1 + k) % s.num_nodes;
}

/// Whether token `token` has a topk slot on the node that is asked for. @param writes_ids the ids
/// as other nodes read them, too
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

/// Puts to one other node of what goes whole: one at least, whose arrival is signalled.
__device__ std::int32_t whole_puts(const ListPutsParams& p) {
  std::int32_t puts = 0;
  for (std::int32_t i = 0; i < p.num_whole; ++i) {
    puts += static_cast<std::int32_t>((p.whole[i].total_bytes + max_put_bytes - 1) / max_put_bytes);
  }
  return puts == 0 ? 1 : puts;
}

/// The step of other node k with what goes whole. One thread.
__device__ void list_whole(const ListPutsParams& p, std::int32_t k) {
  const std::int32_t node = other_node(p.shape, k);
  const std::int32_t peer = peer_on(p.shape, node);
  const std::int32_t count = whole_puts(p);
  const std::int32_t first = k * count;
  std::int32_t at = first;
  p.out.puts[first] = put_of(p.whole[0], node, 0, 0);
  p.out.puts[first].peer = peer;
  p.out.puts[first].step = k;
  for (std::int32_t i = 0; i < p.num_whole; ++i) {
    for (std::int64_t offset = 0; offset < p.whole[i].total_bytes; offset += max_put_bytes) {
      const std::int64_t left = p.whole[i].total_bytes - offset;
      NetworkPut put =
          put_of(p.whole[i], node, offset, left < max_put_bytes ? left : max_put_bytes);
      put.peer = peer;
      put.step = k;
      p.out.puts[at++] = put;
    }
  }
  p.out.steps[k] = {0, 0, first, count, k, 1};
  p.out.signals[k] = {peer, p.whole_slot + own_node(p.shape)};
}

/// The counter that says that partial sums of a token are made.
__device__ std::int32_t ready_of(const ListPutsParams& p, std::int32_t k, std::int32_t token) {
  if (p.ready_pieces > 0) return k * p.ready_pieces + token / p.piece_tokens;
  return other_node(p.shape, k) > own_node(p.shape) ? 0 : 1;
}

/// The steps of 32 tokens of other node k. One warp.
__device__ void list_chunks(const ListPutsParams& p, std::int32_t k, std::int32_t first) {
  const MoeShape& s = p.shape;
  const std::int32_t node = other_node(s, k);
  const std::int32_t peer = peer_on(s, node);
  const bool going = goes(p, node, first + lane_id(), p.made_ids != nullptr && k == 0);
  const unsigned tokens = __ballot_sync(all_lanes, going);
  if (p.filter == NodeFilter::none) return;
  // Runs of tokens become puts; none goes on into the next chunk.
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
    p.out.steps[step] = {
        step, waits ? 1 : 0, first_put, __popc(starts & of_chunk) * p.num_parts, step, 1};
    if (waits) p.out.waits[step] = {s.world_size, ready_of(p, k, first + lane_id())};
    p.out.signals[step] = {peer, p.chunk_slot + own_node(s) * p.num_chunks + chunk};
  }
  if ((starts >> lane_id() & 1U) == 0) return;
  // Up to the next token that begins a put or does not go.
  const unsigned behind = lane_id() == 31 ? 0 : (starts | ~tokens) >> (lane_id() + 1);
  const int length = behind == 0 ? 32 - lane_id() : __ffs(static_cast<int>(behind));
  const int nth = __popc(starts & of_chunk & ((1U << lane_id()) - 1));
  for (std::int32_t i = 0; i < p.num_parts; ++i) {
    const std::int64_t row_bytes = p.parts[i].row_bytes;
    NetworkPut put = put_of(p.parts[i], node, (first + lane_id()) * row_bytes, length * row_bytes);
    put.peer = peer;
    put.step = step;
    p.out.puts[first_put + nth * p.num_parts + i] = put;
  }
}

/// The first block says that the call begins.
__device__ void begin_path(const ListPutsParams& p) {
  const std::uint64_t epoch = p.begins >= 0 ? begin_moe_call(p.m, p.begins) : p.m.state->call.epoch;
  if (p.begins >= 0 && threadIdx.x < 32) signal_to_all(p.m.arrive, epoch);
  if (threadIdx.x == 0) p.out.state->epoch = epoch - 1;  // network paths have the numbers of calls
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

cudaError_t prepare_node_paths() {
  cudaFuncAttributes unused{};
  for (const auto* kernel : {reinterpret_cast<const void*>(list_puts_kernel),
                             reinterpret_cast<const void*>(raise_ready_kernel),
                             reinterpret_cast<const void*>(wait_nodes_kernel)}) {
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_list_puts(const ListPutsParams& params, cudaStream_t stream) {
  constexpr std::int32_t most_blocks = 128;
  const MoeShape& s = params.shape;
  const bool lists = params.filter != NodeFilter::none || params.made_ids != nullptr;
  const std::int32_t stretches = lists ? (s.num_nodes - 1) * ((s.max_tokens + 31) / 32) : 1;
  const std::int32_t blocks = std::min(most_blocks, (stretches + list_warps - 1) / list_warps);
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

}  // namespace waybill::cuda
