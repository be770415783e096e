#include "../device/number.cuh"
#include "kernels.h"

namespace waybill::cuda {
namespace {

constexpr int threads = 512;
constexpr int piece = 8;  // elements that a lane reads at once, where addresses allow it

/// Each warp takes a row.
template <class In>
__global__ void __launch_bounds__(threads) widen_rows_kernel(WidenParams p, bool aligned) {
  const auto lane = static_cast<std::int64_t>(threadIdx.x % 32);
  const std::int64_t warps = std::int64_t{gridDim.x} * (threads / 32);
  for (std::int64_t row = blockIdx.x * (threads / 32) + threadIdx.x / 32; row < p.rows;
       row += warps) {
    const std::byte* const from = p.from + row * p.from_pitch;
    std::byte* const to = p.to + row * p.to_pitch;
    if (aligned) {
      for (std::int64_t i = lane * piece; i < p.elements; i += 32 * piece) {
        const auto in = reinterpret_cast<const Pack<In, piece>*>(from)[i / piece];
        auto* const out = reinterpret_cast<WidePack<Float32>*>(to) + i / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          WidePack<Float32> wide;
#pragma unroll
          for (int k = 0; k < 4; ++k) wide.values[k] = In::load(in.values[half * 4 + k]);
          out[half] = wide;
        }
      }
    } else {
      for (std::int64_t i = lane; i < p.elements; i += 32) {
        reinterpret_cast<float*>(to)[i] =
            In::load(reinterpret_cast<const typename In::Stored*>(from)[i]);
      }
    }
  }
}

}  // namespace

cudaError_t prepare_widen_rows() {
  cudaFuncAttributes unused{};
  const cudaError_t status = cudaFuncGetAttributes(&unused, widen_rows_kernel<BFloat16>);
  return status != cudaSuccess ? status
                               : cudaFuncGetAttributes(&unused, widen_rows_kernel<Float16>);
}

cudaError_t launch_widen_rows(const WidenParams& params, DType from, int num_sms,
                              cudaStream_t stream) {
  const auto multiple = [](const void* pointer, std::int64_t pitch) {
    return (reinterpret_cast<std::uintptr_t>(pointer) | static_cast<std::uintptr_t>(pitch)) % 16 ==
           0;
  };
  const bool aligned = params.elements % piece == 0 && multiple(params.from, params.from_pitch) &&
                       multiple(params.to, params.to_pitch);
  const auto blocks = static_cast<unsigned>(num_sms);
  if (from == DType::bfloat16) {
    widen_rows_kernel<BFloat16><<<blocks, threads, 0, stream>>>(params, aligned);
  } else if (from == DType::float16) {
    widen_rows_kernel<Float16><<<blocks, threads, 0, stream>>>(params, aligned);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace waybill::cuda
