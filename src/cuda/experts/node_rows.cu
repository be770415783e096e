// Which rows cross between nodes, and copies of them to the front of a slice and back.

#include "../device/word_copy.cuh"
#include "call.cuh"
#include "node_rows_launch.h"

namespace waybill::cuda {
namespace {

constexpr int list_threads = 1024;
constexpr int move_warps = 8;

__device__ bool has_slot_on(const MoeShape& s, const std::int32_t* ids, std::int32_t node) {
  bool result = false;
  for (std::int32_t k = 0; k < s.topk; ++k)
    result |= ids[k] >= 0 && ids[k] / (s.experts_per_rank * s.node_ranks) == node;
  return result;
}

/// A block a direction and node, a thread a token at a time.
__global__ void __launch_bounds__(list_threads)
    node_rows_kernel(const __grid_constant__ NodeRowsParams p) {
  __shared__ std::int32_t of_warps[list_threads / 32];
  const MoeShape& s = p.shape;
  const auto i = static_cast<std::int32_t>(threadIdx.x);
  const auto node = static_cast<std::int32_t>(blockIdx.y);
  const bool comes = blockIdx.x == 1;
  const std::int32_t own = s.first_rank / s.node_ranks;
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

/// A warp a row at a time.
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

cudaError_t prepare_node_rows() {
  cudaFuncAttributes unused{};
  for (const int word : {16, 8, 4, 2, 1}) {
    const cudaError_t status =
        cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(move_kernel(word)));
    if (status != cudaSuccess) return status;
  }
  return cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(node_rows_kernel));
}

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

}  // namespace waybill::cuda
