#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "waybill/core/wait.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::cuda {

/// Throws CudaError with the verb; clears the error unless it is sticky.
inline void cuda_check(cudaError_t status, std::string_view doing) {
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  (void)cudaGetLastError();
  int device = -1;
  (void)cudaGetDevice(&device);
  throw CudaError(concat("CUDA error while ", doing, " on device ", device, ": ",
                         cudaGetErrorName(status), " (", cudaGetErrorString(status), ")"));
}

/// Asks until the answer is another than cudaErrorNotReady. @throws as PollingWait::pause
template <class Query>
[[nodiscard]] cudaError_t poll_until_done(Query&& query, WaitOptions options) {
  constexpr int questions_at_once = 16;
  PollingWait wait(std::numeric_limits<double>::infinity(), std::move(options));
  cudaError_t status = query();
  for (int asked = 1; status == cudaErrorNotReady; ++asked) {
    if (asked % questions_at_once == 0) (void)wait.pause();
    status = query();
  }
  if (status == cudaSuccess) (void)cudaGetLastError();  // which may be "not ready"
  return status;
}

/// Zeros in the memory of the current device, cleared on `stream` (not the default stream, on which
/// calls may wait for other ranks). They go back to the device whatever it has been through.
[[nodiscard]] inline std::shared_ptr<void> device_memory(std::int64_t size_bytes,
                                                         cudaStream_t stream) {
  int device = 0;
  cuda_check(cudaGetDevice(&device), "asking for the current device");
  void* memory = nullptr;
  const auto size = static_cast<std::size_t>(size_bytes > 0 ? size_bytes : 1);
  cuda_check(cudaMalloc(&memory, size), "allocating device memory");
  std::shared_ptr<void> owner(memory, [device](void* at) {
    int current = 0;
    (void)cudaGetDevice(&current);
    (void)cudaSetDevice(device);
    (void)cudaFree(at);
    (void)cudaSetDevice(current);
  });
  cuda_check(cudaMemsetAsync(memory, 0, size, stream), "clearing device memory");
  cuda_check(
      poll_until_done([&] { return cudaStreamQuery(stream); }, {.yields_s = 0.02, .check = {}}),
      "clearing device memory");
  return owner;
}

/// Zeros in pinned host memory that devices see as well.
[[nodiscard]] inline std::shared_ptr<void> pinned_memory(std::int64_t size_bytes) {
  void* memory = nullptr;
  cuda_check(cudaHostAlloc(&memory, static_cast<std::size_t>(size_bytes > 0 ? size_bytes : 1),
                           cudaHostAllocPortable | cudaHostAllocMapped),
             "allocating pinned host memory");
  return {memory, [](void* at) { (void)cudaFreeHost(at); }};
}

}  // namespace waybill::cuda
