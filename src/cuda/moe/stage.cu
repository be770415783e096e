// What happens to rows on their own rank before they travel: staging, sums of a token's rows,
// quantisation.

#include "../device/number.cuh"
#include "launch.h"

namespace waybill::cuda {
namespace {

constexpr unsigned all_lanes = 0xFFFFFFFFU;
constexpr int warps = 16;
constexpr int unroll = 4;

__device__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ std::int64_t warp_id() { return std::int64_t{blockIdx.x} * warps + threadIdx.x / 32; }
__device__ std::int64_t num_warps() { return std::int64_t{gridDim.x} * warps; }

/// Expert outputs as they are.
template <class Word>
__global__ void __launch_bounds__(warps * 32) copy_rows_kernel(StageParams p) {
  const std::int64_t rows = min(std::int64_t{*p.num_recv_rows}, p.shape.capacity);
  const std::int64_t count = rows * p.row_bytes / static_cast<int>(sizeof(Word));
  const std::int64_t step = std::int64_t{gridDim.x} * warps * 32 * unroll;
  const auto* const from = reinterpret_cast<const Word*>(p.input);
  auto* const to = reinterpret_cast<Word*>(p.window);
  for (std::int64_t first = warp_id() * 32 * unroll + lane_id(); first < count; first += step) {
    Word words[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * 32 < count) words[u] = from[first + u * 32];
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * 32 < count) to[first + u * 32] = words[u];
    }
  }
}

template <class Number, int Count>
struct alignas(Count * sizeof(typename Number::Stored)) Pack {
  typename Number::Stored values[Count];
};

/// The rows of a token that are here, `row` of each lane, summed into the first of them.
template <class Number, int Count>
__device__ void sum_token(const StageParams& p, std::int32_t row, unsigned here) {
  using Packed = Pack<Number, Count>;
  const auto packs = static_cast<int>(p.row_bytes / static_cast<int>(sizeof(Packed)));
  const int leader = __shfl_sync(all_lanes, row, __ffs(static_cast<int>(here)) - 1);
  const bool one = (here & (here - 1)) == 0;
  for (int first = lane_id(); first - lane_id() < packs; first += 32 * 2) {
    float sums[2][Count] = {};
    Packed packed[2];
    for (unsigned left = here; left != 0; left &= left - 1) {
      const std::int32_t from = __shfl_sync(all_lanes, row, __ffs(static_cast<int>(left)) - 1);
      const auto* const at = reinterpret_cast<const Packed*>(p.input + from * p.row_bytes);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if (first + u * 32 < packs) packed[u] = at[first + u * 32];
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int e = 0; e < Count; ++e) {
          sums[u][e] = __fadd_rn(sums[u][e], Number::load(packed[u].values[e]));
        }
      }
    }
    auto* const to = reinterpret_cast<Packed*>(p.window + leader * p.row_bytes);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (first + u * 32 >= packs) continue;
      if (!one) {
#pragma unroll
        for (int e = 0; e < Count; ++e) packed[u].values[e] = Number::round(sums[u][e]);
      }
      to[first + u * 32] = packed[u];
    }
  }
}

template <class Number, int Count>
__global__ void __launch_bounds__(warps * 32) sum_rows_kernel(StageParams p) {
  const MoeShape& s = p.shape;
  const std::int64_t tokens = std::int64_t{s.world_size} * s.max_tokens;
  for (std::int64_t i = warp_id(); i < tokens; i += num_warps()) {
    // Neighbouring warps take tokens of different sources, which differ in number.
    const auto source = static_cast<std::int32_t>(i % s.world_size);
    const auto token = static_cast<std::int32_t>(i / s.world_size);
    if (token >= p.num_input_tokens[source]) continue;
    std::int32_t row = -1;
    if (lane_id() < s.topk) {
      row = p.records[(std::int64_t{source} * s.max_tokens + token) * s.topk + lane_id()];
    }
    if (row >= s.capacity) row = -1;
    const unsigned here = __ballot_sync(all_lanes, row >= 0);
    if (here == 0) continue;
    if ((here & (here - 1)) == 0 && p.input == p.window) continue;
    sum_token<Number, Count>(p, row, here);
  }
}

using StageKernel = void (*)(StageParams);

template <class Number>
StageKernel sum_kernel(bool wide) {
  constexpr int most = 16 / static_cast<int>(sizeof(typename Number::Stored));
  return wide ? sum_rows_kernel<Number, most> : sum_rows_kernel<Number, 1>;
}

StageKernel sum_kernel(DType dtype, bool wide) {
  switch (dtype) {
    case DType::float32:
      return sum_kernel<Float32>(wide);
    case DType::bfloat16:
      return sum_kernel<BFloat16>(wide);
    case DType::float16:
      return sum_kernel<Float16>(wide);
    default:
      return nullptr;
  }
}

StageKernel copy_kernel(int word_bytes) {
  switch (word_bytes) {
    case 16:
      return copy_rows_kernel<uint4>;
    case 8:
      return copy_rows_kernel<uint2>;
    case 4:
      return copy_rows_kernel<std::uint32_t>;
    case 2:
      return copy_rows_kernel<std::uint16_t>;
    default:
      return copy_rows_kernel<std::uint8_t>;
  }
}

/// A group of 128 elements by half a warp: 8 elements a lane.
template <class Number>
__global__ void __launch_bounds__(warps * 32) quantize_kernel(QuantizeParams p) {
  const int lane = lane_id() % 16;
  for (std::int64_t g = warp_id() * 2 + lane_id() / 16; g - lane_id() / 16 < p.num_groups;
       g += num_warps() * 2) {
    const bool is_group = g < p.num_groups;
    float x[8] = {};
    unsigned most = 0;  // bits of |x|: their order is that of the numbers, NaN above all
    if (is_group) {
      const auto* const from =
          reinterpret_cast<const typename Number::Stored*>(p.input) + g * 128 + lane * 8;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        x[e] = Number::load(from[e]);
        most = max(most, __float_as_uint(x[e]) & 0x7FFFFFFFU);
      }
    }
    for (int step = 8; step > 0; step /= 2) {
      most = max(most, __shfl_xor_sync(all_lanes, most, step, 16));
    }
    if (!is_group) continue;
    const float scale = __fmul_rn(__uint_as_float(most), 1.0F / 448.0F);
    std::uint64_t bytes = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float q = scale == 0 ? 0.0F : __fdiv_rn(x[e], scale);
      const float q_or_nan = scale == scale ? q : scale;
      bytes |= std::uint64_t{float_to_e4m3(q_or_nan)} << (8 * e);
    }
    *reinterpret_cast<std::uint64_t*>(p.elements + g * 128 + lane * 8) = bytes;
    if (lane == 0) p.scales[g] = scale;
  }
}

using QuantizeKernel = void (*)(QuantizeParams);

QuantizeKernel quantize_kernel(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return quantize_kernel<Float32>;
    case DType::bfloat16:
      return quantize_kernel<BFloat16>;
    case DType::float16:
      return quantize_kernel<Float16>;
    default:
      return nullptr;
  }
}

cudaError_t load(const void* kernel) {
  cudaFuncAttributes unused{};
  return kernel == nullptr ? cudaErrorInvalidValue : cudaFuncGetAttributes(&unused, kernel);
}

}  // namespace

cudaError_t prepare_stage(DType dtype) {
  for (const int word : {16, 8, 4, 2, 1}) {
    const cudaError_t status = load(reinterpret_cast<const void*>(copy_kernel(word)));
    if (status != cudaSuccess) return status;
  }
  for (const bool wide : {false, true}) {
    const cudaError_t status = load(reinterpret_cast<const void*>(sum_kernel(dtype, wide)));
    if (status != cudaSuccess) return status;
  }
  return load(reinterpret_cast<const void*>(quantize_kernel(dtype)));
}

cudaError_t launch_copy_rows(const StageParams& params, int word_bytes, int blocks,
                             cudaStream_t stream) {
  copy_kernel(word_bytes)<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_sum_rows(const StageParams& params, DType dtype, bool wide, int blocks,
                            cudaStream_t stream) {
  const StageKernel kernel = sum_kernel(dtype, wide);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_quantize(const QuantizeParams& params, DType dtype, int blocks,
                            cudaStream_t stream) {
  const QuantizeKernel kernel = quantize_kernel(dtype);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
