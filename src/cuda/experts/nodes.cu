// Ids and tables of several nodes, and the sum of what nodes send back.

#include "../device/number.cuh"
#include "call.cuh"
#include "chunk_slots.cuh"
#include "nodes_launch.h"

namespace waybill::cuda {
namespace {

constexpr int warps = 16;
constexpr int tile_tokens = 256;  ///< no run crosses an edge

/// Bits of a tile's tokens, before thread `i`.
__device__ int bits_before(const unsigned (&words)[tile_tokens / 32], int i) {
  int count = __popc(words[i / 32] & ((1U << (i % 32)) - 1));
  for (int w = 0; w < i / 32; ++w) count += __popc(words[w]);
  return count;
}

/// A block a tile of one node's tokens, a thread a token.
__global__ void __launch_bounds__(tile_tokens) node_runs_kernel(NodeRunsParams p) {
  __shared__ unsigned going[tile_tokens / 32];
  __shared__ unsigned starting[tile_tokens / 32];
  __shared__ unsigned ending[tile_tokens / 32];
  const MoeShape& s = p.shape;
  const auto node = static_cast<std::int32_t>(blockIdx.y);
  const std::int32_t own = s.first_rank / s.node_ranks;
  const auto i = static_cast<int>(threadIdx.x);
  const auto first = static_cast<std::int32_t>(blockIdx.x) * tile_tokens;
  const std::int32_t token = first + i;
  const std::int64_t from_node = std::int64_t{node} * s.max_tokens;
  std::int32_t* const starts = p.runs + 2 * from_node;
  std::int32_t* const ends = starts + s.max_tokens;
  bool goes = false;
  if (token < s.max_tokens) {
    starts[token] = -1;
    ends[token] = -1;
    const std::int32_t* const ids = p.ids + (from_node + token) * s.topk;
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

/// A stretch of 64 packs of one token a warp at a time.
template <class Number, int Count>
__global__ void __launch_bounds__(warps * 32)
    add_partial_sums_kernel(const __grid_constant__ AddPartialSumsParams p) {
  using Packed = Pack<Number, Count>;
  const MoeShape& s = p.shape;
  const auto packs = static_cast<std::int32_t>(p.row_bytes / static_cast<int>(sizeof(Packed)));
  const std::int32_t stretches = (packs + 63) / 64;
  const std::int64_t items = std::int64_t{s.num_tokens} * stretches;
  const std::int32_t own = s.first_rank / s.node_ranks;
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
        add(p.own_share, token);
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
    constexpr int most = 16 / static_cast<int>(sizeof(typename Number::Stored));
    return wide ? add_partial_sums_kernel<Number, most> : add_partial_sums_kernel<Number, 1>;
  });
}

}  // namespace

cudaError_t prepare_nodes(DType tokens) {
  cudaFuncAttributes unused{};
  for (const auto* kernel : {reinterpret_cast<const void*>(node_runs_kernel),
                             reinterpret_cast<const void*>(add_kernel(tokens, false)),
                             reinterpret_cast<const void*>(add_kernel(tokens, true))}) {
    if (kernel == nullptr) return cudaErrorInvalidValue;
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) return status;
  }
  return prepare_node_paths();
}

cudaError_t launch_node_runs(const NodeRunsParams& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((params.shape.max_tokens + tile_tokens - 1) / tile_tokens),
                  static_cast<unsigned>(params.shape.num_nodes));
  node_runs_kernel<<<grid, tile_tokens, 0, stream>>>(params);
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
