#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../rank/gpu_rank.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {

/// The host, process and GPU of a rank, by ids that do not depend on which devices a process sees.
struct GpuPlace {
  std::uint64_t host = 0;
  std::int64_t process = 0;
  cudaUUID_t gpu{};
  std::uint64_t pids = 0;  ///< the namespace of `process`: containers have numbers of their own
};

/// Collective: the places of all ranks. @throws CudaError, Timeout
[[nodiscard]] std::vector<GpuPlace> exchange_places(Bootstrap& bootstrap, int device);

/// Counts the ranks on the GPU of `rank`, itself included.
[[nodiscard]] int ranks_on_gpu_of(const std::vector<GpuPlace>& places, Rank rank);

/// Says whether one of them is in another process.
[[nodiscard]] bool shares_gpu_with_processes(const std::vector<GpuPlace>& places, Rank rank);

/// @throws Unsupported when two ranks are in one process, naming them and the right function
void require_own_processes(const std::vector<GpuPlace>& places, std::string_view who);

/// @throws Unsupported when ranks of one node are on several hosts, naming two of them
void require_nodes_on_hosts(const std::vector<GpuPlace>& places, std::int32_t ranks_per_node,
                            std::string_view who);

/// Names a GPU of `peers`, the ranks from `first` on, whose memory `device` does not reach; empty:
/// there is none. try_to_map() finds out about GPUs that this process does not see.
[[nodiscard]] std::string missing_peer_access(std::span<const GpuPlace> peers, std::int32_t first,
                                              int device);

/// The driver only tells whether visible devices reach each other. Processes that see one GPU each
/// find out by mapping a page of each other's memory. If every rank sees the GPUs of all ranks that
/// it maps, they map nothing.
///
/// Collective: all ranks of the world, whatever they map.
/// @param first, count the ranks whose memory this one maps, itself among them
/// @return the memory that this rank cannot map, in the driver's words; empty: none
[[nodiscard]] std::string try_to_map(Bootstrap& bootstrap, std::string_view who,
                                     const std::vector<GpuPlace>& places, std::int32_t first,
                                     std::int32_t count, const GpuRank& gpu);

}  // namespace waybill::cuda
