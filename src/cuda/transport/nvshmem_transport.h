#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../rank/gpu_rank.h"
#include "gpu_place.h"
#include "gpu_transport.h"

namespace waybill::cuda {

/// Ranks are processes with a GPU each, with symmetric memory of NVSHMEM: pointers inside a node,
/// put and signal of NVSHMEM between nodes.
[[nodiscard]] std::unique_ptr<GpuTransport> make_nvshmem_transport(
    std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node, std::shared_ptr<GpuRank> gpu,
    const std::vector<GpuPlace>& addresses);

}  // namespace waybill::cuda
