#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>

#include "core/test_hooks.h"
#include "device_limits.h"
#include "gpu_rank.h"

namespace waybill::cuda {
namespace {

constexpr int bulk_version = 90;  // bulk.cuh: compute capability 9.0 and later

/// It is compiled as all other kernels are, so its attributes are theirs.
__global__ void probe_kernel() {}

/// The last value read from each device; 0: none.
std::array<std::atomic<int>, 64> known_shared_bytes{};

/// Says whether the kernels that the device has loaded have bulk copies.
bool kernels_have_bulk_copies(int device) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion) {
    (void)cudaGetLastError();
    cudaDeviceProp properties{};
    cuda_check(cudaGetDeviceProperties(&properties, device), "reading device properties");
    throw Unsupported(concat("device ", device, " has compute capability ", properties.major, ".",
                             properties.minor,
                             ", for which this build has no code: build with "
                             "-DWAYBILL_CUDA_ARCHITECTURES=",
                             properties.major, properties.minor));
  }
  cuda_check(status, "asking for the attributes of a kernel");
  return std::min(attributes.ptxVersion, attributes.binaryVersion) >= bulk_version;
}

}  // namespace

int read_shared_bytes(int device) {
  int bytes = 0;
  cuda_check(cudaSetDevice(device), "choosing the device");
  cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "asking for a block's shared memory");
  const auto max_kb = static_cast<int>(waybill::detail::test_hooks().max_shared_kb);
  if (max_kb > 0) bytes = std::min(bytes, max_kb * 1024);
  const auto index = static_cast<std::size_t>(device);
  if (index < known_shared_bytes.size()) known_shared_bytes[index] = bytes;
  return bytes;
}

bool has_bulk_copies(int device) {
  const bool has_room = read_shared_bytes(device) >= bulk_shared_bytes;
  return kernels_have_bulk_copies(device) && has_room &&
         waybill::detail::test_hooks().no_bulk_copies == 0;
}

int shared_bytes_of_block() {
  int device = 0;
  cuda_check(cudaGetDevice(&device), "asking for the current device");
  const auto index = static_cast<std::size_t>(device);
  const int known = index < known_shared_bytes.size() ? known_shared_bytes[index].load() : 0;
  return known > 0 ? known : read_shared_bytes(device);
}

}  // namespace waybill::cuda
