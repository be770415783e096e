#include "cuda/gpu_report.h"

#include <cuda_runtime_api.h>

#include "nccl/nccl_communicator.h"
#include "nvshmem/nvshmem_api.h"
#include "rank/device_limits.h"
#include "rank/gpu_rank.h"

namespace waybill {
namespace {

std::string version_text(int version) {
  return version == 0 ? "" : concat(version / 1000, ".", version % 1000 / 10);
}

GpuFacts facts_of(int device) {
  GpuFacts facts;
  facts.device = device;
  try {
    cudaDeviceProp properties{};
    cuda::cuda_check(cudaGetDeviceProperties(&properties, device), "reading device properties");
    facts.name = properties.name;
    facts.major = properties.major;
    facts.minor = properties.minor;
    facts.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
    facts.num_sms = properties.multiProcessorCount;
    int ipc = 0;
    (void)cudaDeviceGetAttribute(&ipc, cudaDevAttrIpcEventSupport, device);
    facts.ipc = ipc != 0;
    facts.shared_bytes = cuda::read_shared_bytes(device);
    facts.bulk_copies = cuda::has_bulk_copies(device);
  } catch (const Error& error) {
    facts.trouble = error.what();
  }
  return facts;
}

std::vector<std::vector<bool>> ask_peer_access(int num_gpus) {
  const std::size_t count = num_gpus;
  std::vector<std::vector<bool>> access(count, std::vector<bool>(count, true));
  for (int from = 0; from < num_gpus; ++from) {
    for (int to = 0; to < num_gpus; ++to) {
      int can = 1;
      if (from != to && cudaDeviceCanAccessPeer(&can, from, to) != cudaSuccess) can = 0;
      access[from][to] = can != 0;
    }
  }
  (void)cudaGetLastError();
  return access;
}

int runtime_version() {
  int version = 0;
  (void)cudaRuntimeGetVersion(&version);
  return version;
}

int driver_version() {
  int version = 0;
  (void)cudaDriverGetVersion(&version);
  return version;
}

}  // namespace

std::string driver_trouble() {
  const int runtime = runtime_version();
  const int driver = driver_version();
  if (driver == 0 || driver / 1000 >= runtime / 1000) return {};  // minor ones work together
  return concat("the driver takes CUDA ", version_text(driver),
                " at most, and this build is of CUDA ", version_text(runtime),
                ": install driver 580 or later");
}

GpuReport report_gpus() {
  GpuReport report;
  report.runtime = version_text(runtime_version());
  report.driver = version_text(driver_version());
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  (void)cudaGetLastError();
  for (int device = 0; device < count; ++device) report.gpus.push_back(facts_of(device));
  report.peer_access = ask_peer_access(count);
  try {
    report.nccl = cuda::nccl_version_text(cuda::nccl_api().version);
  } catch (const Error& error) {
    report.nccl_trouble = error.what();
  }
  try {
    (void)cuda::nvshmem_api();
    report.nvshmem = true;
  } catch (const Error& error) {
    report.nvshmem_trouble = error.what();
  }
  return report;
}

}  // namespace waybill
