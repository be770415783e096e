#pragma once

#include <memory>

#include "../nccl/nccl_communicator.h"
#include "../network/network_path.h"
#include "../nvshmem/nvshmem_api.h"
#include "../rank/gpu_rank.h"

namespace waybill::cuda {

/// Makes the path between logical nodes whose memory is mapped: a kernel that copies.
/// @param share ranks on this device
[[nodiscard]] std::unique_ptr<NetworkPath> make_peer_path(std::shared_ptr<GpuRank> gpu,
                                                          Topology topology, int share);

/// Makes the path over NVSHMEM: a kernel of libwaybill_nvshmem.so puts and signals without the
/// host.
[[nodiscard]] std::unique_ptr<NetworkPath> make_nvshmem_path(const NvshmemApi& api,
                                                             std::shared_ptr<GpuRank> gpu,
                                                             Topology topology);

/// Makes the path between nodes that NCCL connects: the host queues the phases of a plan.
/// @param share ranks on this device
[[nodiscard]] std::unique_ptr<NetworkPath> make_nccl_path(
    std::shared_ptr<GpuRank> gpu, Topology topology, int share,
    std::shared_ptr<NcclCommunicator> communicator);

}  // namespace waybill::cuda
