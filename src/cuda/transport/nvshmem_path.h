#pragma once

#include <memory>

#include "../network/network_path.h"
#include "../nvshmem/nvshmem_api.h"
#include "../rank/gpu_rank.h"

namespace waybill::cuda {

/// Over NVSHMEM: a kernel of libwaybill_nvshmem.so puts and signals, without the host.
[[nodiscard]] std::unique_ptr<NetworkPath> make_nvshmem_path(const NvshmemApi& api,
                                                             std::shared_ptr<GpuRank> gpu,
                                                             Topology topology);

}  // namespace waybill::cuda
