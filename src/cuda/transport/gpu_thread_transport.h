#pragma once

#include <cstdint>
#include <memory>

#include "../rank/gpu_rank.h"
#include "gpu_transport.h"

namespace waybill::cuda {

/// Ranks are threads of one process, with the memory of GPUs that reach each other's.
/// @param share ranks on this rank's device
/// @throws Unsupported without peer access where WAYBILL_PEER_ACCESS refuses memory of the host
[[nodiscard]] std::unique_ptr<GpuTransport> make_gpu_thread_transport(
    std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node, std::shared_ptr<GpuRank> gpu,
    int share);

}  // namespace waybill::cuda
