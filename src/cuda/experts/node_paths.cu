// What crosses between nodes in a call of experts, as a program for the network path.

#include "expert_arrive.cuh"
#include "lanes.cuh"
#include "nodes_launch.h"

namespace waybill::cuda {
namespace {

constexpr int list_warps = 32;

__device__ std::int32_t own_node(const MoeShape& s) { return s.first_rank / s.node_ranks; }
__device__ std::int32_t peer_on(const MoeShape& s, std::int32_t node) {
  return node * s.node_ranks + s.rank - s.first_rank;
}

/// Of 32 tokens, those whose rows go to `node`. One warp.
__device__ unsigned going(const ListPutsParams& p, std::int32_t node, std::int32_t first) {
  const MoeShape& s = p.shape;
  const std::int32_t token = first + lane_id();
  const bool partial_sums = p.filter == NodeFilter::partial_sums;
  const std::int32_t wanted = partial_sums ? own_node(s) : node;
  const std::int64_t slice = partial_sums ? std::int64_t{node} * s.max_tokens : 0;
  bool goes = false;
  if (token < s.max_tokens) {
    const std::int32_t* const ids = p.ids + (slice + token) * s.topk;
    for (std::int32_t k = 0; k < s.topk; ++k) {
      goes |= ids[k] >= 0 && ids[k] / (s.experts_per_rank * s.node_ranks) == wanted;
    }
  }
  return __ballot_sync(all_lanes, goes);
}

/// First tokens of the puts that carry the set ones of 32: runs, cut where a put would get too
/// long.
__device__ unsigned put_starts(unsigned tokens, std::int64_t row_bytes) {
  const std::int64_t most = max_put_bytes / row_bytes;
  unsigned starts = tokens & ~(tokens << 1U);
  if (most < 32) {
    const auto step = static_cast<int>(most < 1 ? 1 : most);
    starts |= tokens & __ballot_sync(all_lanes, lane_id() % step == 0);
  }
  return starts;
}

__device__ NetworkPut put_of(const NodePart& part, std::int32_t node, std::int64_t offset,
                             std::int64_t size_bytes) {
  NetworkPut put{};
  put.from_bytes = part.from + node * part.from_node_bytes + offset;
  put.to_bytes = part.to + offset;
  put.size_bytes = size_bytes;
  return put;
}

/// Puts of the rows that go to the node of step `step`, from number `first_put` on. All warps.
/// @return their number
__device__ std::int32_t list_rows(const ListPutsParams& p, std::int32_t step, std::int32_t node,
                                  std::int32_t first_put) {
  __shared__ std::int32_t counts[list_warps];
  const MoeShape& s = p.shape;
  const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
  std::int32_t done = 0;
  for (std::int32_t round = 0; round < s.max_tokens; round += 32 * list_warps) {
    const std::int32_t first = round + warp * 32;
    const unsigned tokens = going(p, node, first);
    const unsigned starts = put_starts(tokens, p.parts[0].row_bytes);
    if (lane_id() == 0) counts[warp] = __popc(starts);
    __syncthreads();
    const std::int32_t others = counts[lane_id()];
    const std::int32_t before = __reduce_add_sync(all_lanes, lane_id() < warp ? others : 0) +
                                __popc(starts & ((1U << lane_id()) - 1));
    const std::int32_t all = __reduce_add_sync(all_lanes, others);
    if ((starts >> lane_id() & 1U) != 0) {
      // Up to the next token that begins a put or does not go.
      const unsigned behind = lane_id() == 31 ? 0 : (starts | ~tokens) >> (lane_id() + 1);
      const int length = behind == 0 ? 32 - lane_id() : __ffs(static_cast<int>(behind));
      for (std::int32_t i = 0; i < p.num_parts; ++i) {
        const std::int64_t row_bytes = p.parts[i].row_bytes;
        NetworkPut put =
            put_of(p.parts[i], node, (first + lane_id()) * row_bytes, length * row_bytes);
        put.peer = peer_on(s, node);
        put.step = step;
        p.out.puts[first_put + (done + before) * p.num_parts + i] = put;
      }
    }
    done += all;
    __syncthreads();  // counts have been read
  }
  return done * p.num_parts;
}

/// Puts of whole parts.
__device__ std::int32_t list_all(const ListPutsParams& p, std::int32_t step, std::int32_t node,
                                 std::int32_t first_put) {
  std::int32_t done = 0;
  for (std::int32_t i = 0; i < p.num_parts; ++i) {
    const NodePart& part = p.parts[i];
    const auto pieces =
        static_cast<std::int32_t>((part.total_bytes + max_put_bytes - 1) / max_put_bytes);
    for (auto k = static_cast<std::int32_t>(threadIdx.x); k < pieces; k += list_warps * 32) {
      const std::int64_t offset = k * max_put_bytes;
      const std::int64_t left = part.total_bytes - offset;
      NetworkPut put = put_of(part, node, offset, left < max_put_bytes ? left : max_put_bytes);
      put.peer = peer_on(p.shape, node);
      put.step = step;
      p.out.puts[first_put + done + k] = put;
    }
    done += pieces;
  }
  return done;
}

/// The step behind the puts: begins when the peer has entered, where the call begins; tells the
/// peer when all have arrived. One thread.
__device__ void list_step(const ListPutsParams& p, std::int32_t step, std::int32_t node,
                          std::int32_t first_put, std::int32_t num_puts) {
  const std::int32_t peer = peer_on(p.shape, node);
  const bool waits = p.begins >= 0;
  p.out.steps[step] = {step, waits ? 1 : 0, first_put, num_puts, step, 1};
  p.out.waits[step] = {peer, peer};  // slots of `entered` are the first ones
  p.out.signals[step] = {peer, p.first_signal + p.shape.rank};
}

__global__ void __launch_bounds__(list_warps * 32)
    list_puts_kernel(const __grid_constant__ ListPutsParams p) {
  const MoeShape& s = p.shape;
  const std::uint64_t epoch = p.begins >= 0 ? begin_moe_call(p.m, p.begins) : p.m.state->call.epoch;
  if (p.begins >= 0 && threadIdx.x < 32) {
    signal_to_all(p.m.arrive, epoch);
  }
  std::int32_t num_puts = 0;
  for (std::int32_t step = 0; step < s.num_nodes - 1 && p.num_parts > 0; ++step) {
    const std::int32_t node = (own_node(s) + 1 + step) % s.num_nodes;
    std::int32_t puts = p.filter == NodeFilter::all ? list_all(p, step, node, num_puts)
                                                    : list_rows(p, step, node, num_puts);
    if (puts == 0) {  // the signal must be raised all the same
      if (threadIdx.x == 0) {
        NetworkPut put = put_of(p.parts[0], node, 0, 0);
        put.peer = peer_on(s, node);
        put.step = step;
        p.out.puts[num_puts] = put;
      }
      puts = 1;
    }
    if (threadIdx.x == 0) list_step(p, step, node, num_puts, puts);
    num_puts += puts;
  }
  if (threadIdx.x != 0) return;
  *p.out.num_puts = num_puts;
  p.out.state->epoch = epoch - 1;  // network paths have the numbers of calls
}

__global__ void __launch_bounds__(32) wait_nodes_kernel(const __grid_constant__ WaitNodesParams p) {
  const MoeShape& s = p.shape;
  const std::uint64_t epoch = p.m.state->call.epoch + (p.begins >= 0 ? 1 : 0);
  if (p.begins >= 0) wait_all(p.m.arrive, epoch);
  for (std::int32_t k = 1 + lane_id(); k < s.num_nodes && p.slots != nullptr; k += 32) {
    const std::int32_t peer = peer_on(s, (own_node(s) + k) % s.num_nodes);
    wait_slot(p.m.arrive, p.slots + peer, epoch, peer);
  }
  __syncwarp();
  if (p.counts && threadIdx.x == 0) end_moe_call(p.m, p.begins, epoch);
}

}  // namespace

cudaError_t prepare_node_paths() {
  cudaFuncAttributes unused{};
  const cudaError_t status = cudaFuncGetAttributes(&unused, list_puts_kernel);
  return status != cudaSuccess ? status : cudaFuncGetAttributes(&unused, wait_nodes_kernel);
}

cudaError_t launch_list_puts(const ListPutsParams& params, cudaStream_t stream) {
  list_puts_kernel<<<1, list_warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_wait_nodes(const WaitNodesParams& params, cudaStream_t stream) {
  wait_nodes_kernel<<<1, 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
