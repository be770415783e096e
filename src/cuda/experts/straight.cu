#include "../device/number.cuh"
#include "../device/peers.cuh"
#include "expert_arrive.cuh"
#include "input_fault.cuh"
#include "lanes.cuh"
#include "straight_launch.h"

namespace waybill::cuda {
namespace {

constexpr int begin_threads = 512;
constexpr int combine_warps = 16;
constexpr int packs_of_lane = 2;

__device__ std::int32_t peer_on(const MoeShape& s, std::int32_t node) {
  return node * s.node_ranks + s.rank - s.first_rank;
}

__global__ void __launch_bounds__(begin_threads)
    straight_begin_kernel(const __grid_constant__ StraightBeginParams p) {
  const MoeShape& s = p.shape;
  const std::int32_t own = s.first_rank / s.node_ranks;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  if (thread < 32) {
    signal_to_all(p.m.arrive, epoch);
    wait_all(p.m.arrive, epoch);
  }
  __syncthreads();  // nobody reads what the last call left
  const std::int64_t all = std::int64_t{s.max_tokens} * s.topk;
  const std::int64_t given = std::int64_t{s.num_tokens} * s.topk;
  bool bad = false;
  for (std::int32_t node = 0; node < s.num_nodes; ++node) {
    std::byte* const workspace = peer_at(p.workspaces, peer_on(s, node));
    auto* const ids = reinterpret_cast<std::int32_t*>(workspace + p.ids_offset) + own * all;
    for (std::int64_t i = thread; i < all && p.counts; i += begin_threads)
      ids[i] = id_to_send(s, p.ids, p.wide_ids, p.dropped_id, i, bad);
    std::byte* const weights = workspace + p.weights_offset + own * all * p.weight_bytes;
    for (std::int64_t i = thread; i < given && p.weights != nullptr; i += begin_threads)
      copy_weight(weights, p.weights, i, i, p.weight_bytes);
  }
  if (bad) report_bad_id(BadIds{s, p.ids, p.wide_ids, p.dropped_id}, p.m.arrive.sink, p.m.state);
  __threadfence_system();
  __syncthreads();
  for (std::int32_t k = 1 + thread; k < s.num_nodes; k += begin_threads) {
    const std::int32_t node = (own + k) % s.num_nodes;
    signal(peer_at(p.posted, peer_on(s, node)) + own, epoch);
    wait_slot(p.m.arrive, p.own_posted + node, epoch, peer_on(s, node));
  }
}

/// One topk slot of a token, and where its row is; a lane each.
struct Slot {
  std::int32_t node;  ///< -1: none
  bool counts;        ///< its row is part of the sum
  const std::byte* row;
  float weight;
};

template <class Weight>
__device__ Slot read_slot(const StraightCombineParams& p, std::int64_t token) {
  const MoeShape& s = p.shape;
  Slot slot{-1, false, p.lost_row, 0};
  if (lane_id() >= s.topk) return slot;
  const std::int64_t i = token * s.topk + lane_id();
  const std::int32_t id = p.ids[i];
  const std::int64_t address = p.addresses[i];
  if (0 <= id && id < s.num_experts) slot.node = id / (s.experts_per_rank * s.node_ranks);
  if (p.weights != nullptr) slot.weight = number_at<Weight>(p.weights, i);
  if (address < 0) return slot;
  const std::int64_t row = address & 0xFFFFFFFF;
  const bool is_lost = row >= s.capacity_rows;  // NaN stands for it
  slot.counts = is_lost || p.primary_only == 0 || (address & primary_row_bit) != 0;
  const auto rank = static_cast<std::int32_t>(address >> address_dst_shift & 0xFFFF);
  if (!is_lost) slot.row = peer_at(p.windows, rank) + row * p.row_bytes;
  return slot;
}

template <class Number, int Count>
struct LaneSums {
  using Packed = Pack<Number, Count>;
  float sums[packs_of_lane][Count] = {};

  /// Adds a row's packs first, first + 32, ...
  __device__ void add(const std::byte* row, std::int32_t first, std::int32_t packs, bool weighted,
                      float weight) {
    const auto* const from = reinterpret_cast<const Packed*>(row);
#pragma unroll
    for (int u = 0; u < packs_of_lane; ++u) {
      if (first + u * 32 >= packs) continue;
      const Packed packed = from[first + u * 32];
#pragma unroll
      for (int e = 0; e < Count; ++e) {
        const float x = Number::load(packed.values[e]);
        sums[u][e] = __fadd_rn(sums[u][e], weighted ? __fmul_rn(weight, x) : x);
      }
    }
  }
  __device__ void add_rounded(const LaneSums& other) {
#pragma unroll
    for (int u = 0; u < packs_of_lane; ++u) {
#pragma unroll
      for (int e = 0; e < Count; ++e) {
        const float x = Number::load(Number::round(other.sums[u][e]));
        sums[u][e] = __fadd_rn(sums[u][e], x);
      }
    }
  }
  __device__ void write(std::byte* row, std::int32_t first, std::int32_t packs) const {
#pragma unroll
    for (int u = 0; u < packs_of_lane; ++u) {
      if (first + u * 32 >= packs) continue;
      Packed packed;
#pragma unroll
      for (int e = 0; e < Count; ++e) packed.values[e] = Number::round(sums[u][e]);
      reinterpret_cast<Packed*>(row)[first + u * 32] = packed;
    }
  }
};

/// A stretch of one token a warp at a time.
template <class Number, class Weight, int Count>
__device__ void sum_tokens(const StraightCombineParams& p) {
  const MoeShape& s = p.shape;
  const auto packs =
      static_cast<std::int32_t>(p.row_bytes / static_cast<int>(sizeof(Pack<Number, Count>)));
  constexpr std::int32_t stretch = 32 * packs_of_lane;
  const std::int32_t stretches = (packs + stretch - 1) / stretch;
  const std::int64_t items = std::int64_t{s.num_tokens} * stretches;
  for (std::int64_t item = blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x; item < items;
       item += std::int64_t{gridDim.x} * combine_warps) {
    const std::int64_t token = item / stretches;
    const auto first = static_cast<std::int32_t>(item % stretches) * stretch + lane_id();
    const Slot slot = read_slot<Weight>(p, token);
    LaneSums<Number, Count> all;
    for (const std::byte* bias : p.biases) {
      if (bias != nullptr) all.add(bias + token * p.row_bytes, first, packs, false, 0);
    }
    for (std::int32_t node = 0; node < s.num_nodes; ++node) {
      if (!__any_sync(all_lanes, slot.node == node)) continue;
      LaneSums<Number, Count> of_node;
      unsigned left = __ballot_sync(all_lanes, slot.node == node && slot.counts);
      for (; left != 0; left &= left - 1) {
        const int k = __ffs(static_cast<int>(left)) - 1;
        const std::uint64_t row =
            __shfl_sync(all_lanes, reinterpret_cast<std::uint64_t>(slot.row), k);
        const float weight = __shfl_sync(all_lanes, slot.weight, k);
        of_node.add(reinterpret_cast<const std::byte*>(row), first, packs, p.weights != nullptr,
                    weight);
      }
      all.add_rounded(of_node);
    }
    all.write(p.output + token * p.row_bytes, first, packs);
  }
}

template <class Number, class Weight, int Count>
__global__ void __launch_bounds__(combine_warps * 32)
    straight_combine_kernel(const __grid_constant__ StraightCombineParams p) {
  const std::uint64_t epoch = begin_moe_call(p.m, 1);
  arrive_and_wait(p.m.arrive, epoch);
  const bool compares = compares_calls();
  CallComparison comparison(p.m.arrive, epoch, compares);
  linger_block(p.m);
  sum_tokens<Number, Weight, Count>(p);
  if (compares) comparison.settle(p.m.arrive);
  if (comes_last(p.m.state)) end_moe_call(p.m, 1, epoch);
}

using Kernel = void (*)(StraightCombineParams);

Kernel kernel_for(DType tokens, DType weights, bool wide) {
  return for_number(tokens, [&]<class Number>(Number) -> Kernel {
    return for_number(weights, [&]<class Weight>(Weight) -> Kernel {
      constexpr int most = 16 / static_cast<int>(sizeof(typename Number::Stored));
      return wide ? straight_combine_kernel<Number, Weight, most>
                  : straight_combine_kernel<Number, Weight, 1>;
    });
  });
}

}  // namespace

cudaError_t prepare_straight(DType tokens, DType weights) {
  cudaFuncAttributes unused{};
  for (const auto* kernel : {reinterpret_cast<const void*>(straight_begin_kernel),
                             reinterpret_cast<const void*>(kernel_for(tokens, weights, false)),
                             reinterpret_cast<const void*>(kernel_for(tokens, weights, true))}) {
    if (kernel == nullptr) return cudaErrorInvalidValue;
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_straight_begin(const StraightBeginParams& params, cudaStream_t stream) {
  straight_begin_kernel<<<1, begin_threads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_straight_combine(const StraightCombineParams& params, DType tokens,
                                    DType weights, bool wide, int blocks, cudaStream_t stream) {
  const Kernel kernel = kernel_for(tokens, weights, wide);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), combine_warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
