#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {

/// Where a rank works: its host, its process there and its GPU, by ids that do not depend on which
/// devices a process sees.
struct GpuPlace {
  std::uint64_t host = 0;
  std::int64_t process = 0;
  cudaUUID_t gpu{};
  std::uint64_t pids = 0;  ///< in which `process` is one: containers have numbers of their own
};

/// Collective: the places of all ranks. @throws CudaError, Timeout
[[nodiscard]] std::vector<GpuPlace> exchange_places(Bootstrap& bootstrap, int device);

/// Ranks on the same GPU as `rank`, itself included.
[[nodiscard]] int ranks_on_gpu_of(const std::vector<GpuPlace>& places, Rank rank);

/// Whether one of them is in another process.
[[nodiscard]] bool shares_gpu_with_processes(const std::vector<GpuPlace>& places, Rank rank);

/// @throws Unsupported when two ranks are in one process, naming them and what to use
void require_own_processes(const std::vector<GpuPlace>& places, std::string_view who);

/// Whether all ranks are on one host.
[[nodiscard]] bool on_one_host(const std::vector<GpuPlace>& places);

/// @throws Unsupported when ranks of one node are on several hosts, naming two of them
void require_nodes_on_hosts(const std::vector<GpuPlace>& places, std::int32_t ranks_per_node,
                            std::string_view who);

/// Whether this process sees the GPU.
[[nodiscard]] bool is_visible(const cudaUUID_t& gpu);

/// What `device` is known not to reach among the GPUs of `peers`, which are the ranks from `first`
/// on; empty: nothing. About GPUs that this process does not see, try_to_map() knows.
[[nodiscard]] std::string missing_peer_access(std::span<const GpuPlace> peers, std::int32_t first,
                                              int device);

}  // namespace waybill::cuda
