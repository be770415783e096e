// Work on expert outputs on their own rank before they travel: staging, sums of a token's rows; and
// the backward of weighted sums.

#include <type_traits>

#include "../device/number.cuh"
#include "../device/word_copy.cuh"
#include "call.cuh"
#include "kernels.h"

namespace waybill::cuda {
namespace {

constexpr int warps = 16;
constexpr int unroll = 4;

__device__ std::int64_t warp_id() { return std::int64_t{blockIdx.x} * warps + threadIdx.x / 32; }
__device__ std::int64_t num_warps() { return std::int64_t{gridDim.x} * warps; }

/// Checks that the input has all rows that have arrived.
/// @return the number of these rows
__device__ std::int64_t checked_rows(const StageParams& p) {
  const std::int64_t rows = min(std::int64_t{*p.num_recv_rows}, p.shape.capacity_rows);
  if (p.num_rows < rows) report_few_rows(p.sink, p.state, p.shape.rank, p.num_rows, rows);
  return rows;
}

__global__ void check_rows_kernel(const __grid_constant__ StageParams p) { (void)checked_rows(p); }

/// Copies expert outputs.
template <class Word>
__global__ void __launch_bounds__(warps * 32)
    copy_rows_kernel(const __grid_constant__ StageParams p) {
  const std::int64_t rows = checked_rows(p);
  const std::int64_t count = rows * p.row_bytes / static_cast<int>(sizeof(Word));
  const std::int64_t step = std::int64_t{gridDim.x} * warps * 32 * unroll;
  const auto* const from = reinterpret_cast<const Word*>(p.input);
  auto* const to = reinterpret_cast<Word*>(p.window);
  for (std::int64_t first = warp_id() * 32 * unroll + lane_id(); first < count; first += step) {
    Word words[unroll];
    load_batch<32>(words, from, first, count);
    store_batch<32>(to, words, first, count);
  }
}

constexpr int sum_packs = 2;    // packs that a lane sums at once
constexpr int sum_addends = 2;  // rows in flight together

/// Sums one lane's part of a piece of a token's rows into the first of these rows. Each lane passes
/// its own `row` and `weight`.
template <class Number, int Count, bool Weighted>
__device__ void sum_piece(const StageParams& p, std::int32_t row, float weight, unsigned here,
                          int first) {
  using Packed = Pack<Number, Count>;
  const auto packs = static_cast<int>(p.row_bytes / static_cast<int>(sizeof(Packed)));
  const int primary_row = __shfl_sync(all_lanes, row, __ffs(static_cast<int>(here)) - 1);
  float sums[sum_packs][Count] = {};
  Packed packed[sum_addends][sum_packs];
  float weights[sum_addends];
  for (unsigned left = here; left != 0;) {
    int count = 0;
#pragma unroll
    for (int a = 0; a < sum_addends; ++a) {
      if (left == 0) continue;
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const std::int32_t from = __shfl_sync(all_lanes, row, lane);
      if (Weighted) weights[a] = __shfl_sync(all_lanes, weight, lane);
      const auto* const at = reinterpret_cast<const Packed*>(p.input + from * p.row_bytes);
#pragma unroll
      for (int u = 0; u < sum_packs; ++u) {
        if (first + u * 32 < packs) packed[a][u] = at[first + u * 32];
      }
      left &= left - 1;
      ++count;
    }
#pragma unroll
    for (int a = 0; a < sum_addends; ++a) {
      if (a >= count) continue;
#pragma unroll
      for (int u = 0; u < sum_packs; ++u) {
#pragma unroll
        for (int e = 0; e < Count; ++e) {
          const float x = Number::load(packed[a][u].values[e]);
          sums[u][e] = __fadd_rn(sums[u][e], Weighted ? __fmul_rn(weights[a], x) : x);
        }
      }
    }
  }
  const bool one = !Weighted && (here & (here - 1)) == 0;  // a token's only row keeps its bits
  auto* const to = reinterpret_cast<Packed*>(p.window + primary_row * p.row_bytes);
#pragma unroll
  for (int u = 0; u < sum_packs; ++u) {
    if (first + u * 32 >= packs) continue;
    if (!one) {
#pragma unroll
      for (int e = 0; e < Count; ++e) packed[0][u].values[e] = Number::round(sums[u][e]);
    }
    to[first + u * 32] = packed[0][u];
  }
}

/// Upper limit of the tokens that have rows here, from all ranks. One warp.
__device__ std::int32_t count_tokens(const StageParams& p) {
  std::int32_t count = 0;
  for (std::int32_t r = lane_id(); r < p.shape.world_size; r += 32) count += p.num_input_tokens[r];
  for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(all_lanes, count, step);
  return count;
}

/// Each warp sums the rows of one token at a time. If there are few tokens, several warps take
/// pieces of each.
/// @tparam Weight dtype of the rows' weights; void: none
template <class Number, int Count, class Weight>
__global__ void __launch_bounds__(warps * 32, 2)
    sum_rows_kernel(const __grid_constant__ StageParams p) {
  const MoeShape& s = p.shape;
  constexpr bool weighted = !std::is_void_v<Weight>;
  constexpr int piece_packs = 32 * sum_packs;
  constexpr int piece_bytes = piece_packs * static_cast<int>(sizeof(Pack<Number, Count>));
  const auto pieces = static_cast<std::int32_t>((p.row_bytes + piece_bytes - 1) / piece_bytes);
  const auto all_warps = static_cast<std::int32_t>(num_warps());
  const std::int32_t split = min(pieces, max(1, all_warps / max(1, count_tokens(p))));
  const std::int32_t teams = all_warps / split;
  const std::int32_t team = static_cast<std::int32_t>(warp_id()) / split;
  const std::int32_t part = static_cast<std::int32_t>(warp_id()) % split;
  if (warp_id() == 0) (void)checked_rows(p);
  const std::int64_t end = min(s.capacity_rows, p.num_rows);
  if (team >= teams) return;
  // Neighbouring warps take tokens of different sources, because sources differ in their number of
  // tokens.
  for (std::int32_t i = team; i < s.world_size * s.max_tokens; i += teams) {
    const std::int32_t source = i % s.world_size;
    const std::int32_t token = i / s.world_size;
    if (token >= p.num_input_tokens[source]) continue;
    std::int32_t row = -1;
    if (lane_id() < s.topk) {
      row = p.records[(std::int64_t{source} * s.max_tokens + token) * s.topk + lane_id()];
    }
    if (row >= end) row = -1;
    const unsigned here = __ballot_sync(all_lanes, row >= 0);
    if (here == 0) continue;
    if (!weighted && (here & (here - 1)) == 0 && p.input == p.window) continue;
    float weight = 0;
    if constexpr (weighted) {
      if (row >= 0) weight = number_at<Weight>(p.weights, row);
    }
    for (std::int32_t piece = part; piece < pieces; piece += split) {
      sum_piece<Number, Count, weighted>(p, row, weight, here, piece * piece_packs + lane_id());
    }
  }
}

using StageKernel = void (*)(StageParams);

/// @tparam Weight void: sums without weights
template <class Weight>
StageKernel sum_kernel(DType dtype, bool wide) {
  return for_number(dtype, [&]<class Number>(Number) -> StageKernel {
    constexpr int wide_count = 16 / static_cast<int>(sizeof(typename Number::Stored));
    return wide ? sum_rows_kernel<Number, wide_count, Weight> : sum_rows_kernel<Number, 1, Weight>;
  });
}

StageKernel sum_kernel(DType dtype, DType weights, bool weighted, bool wide) {
  if (!weighted) return sum_kernel<void>(dtype, wide);
  return for_number(weights, [&]<class Weight>(Weight) { return sum_kernel<Weight>(dtype, wide); });
}

StageKernel copy_kernel(int word_bytes) {
  return for_word(word_bytes,
                  []<class Word>(Word) -> StageKernel { return copy_rows_kernel<Word>; });
}

// Backward of a weighted combine: the gradients of rows and of their weights in one pass over both.

constexpr int lane_elements = 8;  ///< elements per lane in each step of a warp along a row
constexpr int step = 32 * lane_elements;
static_assert(step == weight_gradient_sums);  // each lane holds one partial sum of a step

/// The next elements of a lane.
template <class Number, bool Wide>
struct Elements {
  static constexpr int count = Wide ? 16 / static_cast<int>(sizeof(typename Number::Stored)) : 1;
  static constexpr int packs = lane_elements / count;
  Pack<Number, count> pack[packs];

  __device__ void load(const std::byte* row, std::int64_t first, std::int64_t hidden) {
    const auto* const from = reinterpret_cast<const Pack<Number, count>*>(row) + first / count;
#pragma unroll
    for (int w = 0; w < packs; ++w) {
      if (Wide || first + w < hidden) pack[w] = from[w];
    }
  }
  __device__ void store(std::byte* row, std::int64_t first, std::int64_t hidden) const {
    auto* const to = reinterpret_cast<Pack<Number, count>*>(row) + first / count;
#pragma unroll
    for (int w = 0; w < packs; ++w) {
      if (Wide || first + w < hidden) to[w] = pack[w];
    }
  }
  __device__ typename Number::Stored& operator[](int e) {
    return pack[e / count].values[e % count];
  }
};

/// Adds up the partial sums of all lanes, neighbours first.
__device__ float sum_of(float (&sums)[lane_elements]) {
#pragma unroll
  for (int apart = 1; apart < lane_elements; apart *= 2) {
#pragma unroll
    for (int e = 0; e < lane_elements; e += 2 * apart) {
      sums[e] = __fadd_rn(sums[e], sums[e + apart]);
    }
  }
  float sum = sums[0];
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(all_lanes, sum, apart));
  }
  return sum;
}

/// Each warp takes one row at a time.
template <class Number, class Weight, bool Wide>
__global__ void __launch_bounds__(warps * 32, 2)
    weight_gradient_kernel(const __grid_constant__ WeightGradientParams p) {
  const std::int64_t rows = min(p.num_rows, std::int64_t{*p.num_recv_rows});
  const std::int64_t row_bytes = p.hidden * static_cast<int>(sizeof(typename Number::Stored));
  const bool sums_up = p.rows != nullptr;
  for (std::int64_t row = std::int64_t{blockIdx.x} * warps + threadIdx.x / 32; row < rows;
       row += std::int64_t{gridDim.x} * warps) {
    const std::byte* const from = p.gradients + row * row_bytes;
    const bool writes = p.row_gradients != nullptr;
    const float weight = writes ? number_at<Weight>(p.weights, row) : 0;
    float sums[lane_elements] = {};
    for (std::int64_t i = lane_id() * lane_elements; i < p.hidden; i += step) {
      Elements<Number, Wide> gradient{};
      Elements<Number, Wide> value{};
      gradient.load(from, i, p.hidden);
      if (sums_up) value.load(p.rows + row * row_bytes, i, p.hidden);
#pragma unroll
      for (int e = 0; e < lane_elements; ++e) {
        if (!Wide && i + e >= p.hidden) continue;
        const float x = Number::load(gradient[e]);
        if (sums_up) sums[e] = __fadd_rn(sums[e], __fmul_rn(Number::load(value[e]), x));
        gradient[e] = Number::round(__fmul_rn(weight, x));
      }
      if (writes) gradient.store(p.row_gradients + row * row_bytes, i, p.hidden);
    }
    if (!sums_up) continue;
    const float sum = sum_of(sums);
    if (lane_id() == 0) p.weight_gradients[row] = sum;
  }
}

using WeightGradientKernel = void (*)(WeightGradientParams);

WeightGradientKernel gradient_kernel(DType tokens, DType weights, bool wide) {
  return for_number(tokens, [&]<class Number>(Number) {
    return for_number(weights, [&]<class Weight>(Weight) -> WeightGradientKernel {
      return wide ? weight_gradient_kernel<Number, Weight, true>
                  : weight_gradient_kernel<Number, Weight, false>;
    });
  });
}

}  // namespace

cudaError_t prepare_stage(DType dtype, DType weights) {
  if (const cudaError_t status = load_kernels(check_rows_kernel); status != cudaSuccess) {
    return status;
  }
  for (const int word : {16, 8, 4, 2, 1}) {
    const cudaError_t status = load_kernels(copy_kernel(word));
    if (status != cudaSuccess) return status;
  }
  for (const bool wide : {false, true}) {
    const cudaError_t status = load_kernels(sum_kernel(dtype, weights, false, wide),
                                            sum_kernel(dtype, weights, true, wide));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_check_rows(const StageParams& params, cudaStream_t stream) {
  check_rows_kernel<<<1, 1, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_copy_rows(const StageParams& params, int word_bytes, int blocks,
                             cudaStream_t stream) {
  copy_kernel(word_bytes)<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_sum_rows(const StageParams& params, DType dtype, DType weights, bool wide,
                            int blocks, cudaStream_t stream) {
  const StageKernel kernel = sum_kernel(dtype, weights, params.weights != nullptr, wide);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t prepare_weight_gradient(DType tokens, DType weights) {
  return load_kernels(gradient_kernel(tokens, weights, false),
                      gradient_kernel(tokens, weights, true));
}

cudaError_t launch_weight_gradient(const WeightGradientParams& params, DType tokens, DType weights,
                                   bool wide, int blocks, cudaStream_t stream) {
  const WeightGradientKernel kernel = gradient_kernel(tokens, weights, wide);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
