#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace waybill::cuda {

/// Launches a kernel. @param early it may take its place on the device while the one ahead on the
/// stream ends; before it reads anything it awaits that one (wait_earlier_kernel)
template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared,
                          bool early, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace waybill::cuda
