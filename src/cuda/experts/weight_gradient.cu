// Backward of a weighted combine on the rank that has the rows: the gradients of rows and of their
// weights in one pass over both.

#include "../device/number.cuh"
#include "call.cuh"
#include "launch.h"

namespace waybill::cuda {
namespace {

constexpr int warps = 16;
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

WeightGradientKernel kernel_of(DType tokens, DType weights, bool wide) {
  return for_number(tokens, [&]<class Number>(Number) {
    return for_number(weights, [&]<class Weight>(Weight) -> WeightGradientKernel {
      return wide ? weight_gradient_kernel<Number, Weight, true>
                  : weight_gradient_kernel<Number, Weight, false>;
    });
  });
}

}  // namespace

cudaError_t prepare_weight_gradient(DType tokens, DType weights) {
  return load_kernels(kernel_of(tokens, weights, false), kernel_of(tokens, weights, true));
}

cudaError_t launch_weight_gradient(const WeightGradientParams& params, DType tokens, DType weights,
                                   bool wide, int blocks, cudaStream_t stream) {
  const WeightGradientKernel kernel = kernel_of(tokens, weights, wide);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
