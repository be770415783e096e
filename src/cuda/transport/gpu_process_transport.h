#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../rank/gpu_rank.h"
#include "gpu_place.h"
#include "gpu_transport.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::cuda {

/// Ranks are processes; each maps the device memory of the others (CUDA IPC): of all ranks with the
/// backend `peer`, of those of its node with `nccl`.
[[nodiscard]] std::unique_ptr<GpuTransport> make_gpu_process_transport(
    std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node, std::shared_ptr<GpuRank> gpu,
    const std::vector<GpuPlace>& places, NetworkBackend backend);

}  // namespace waybill::cuda
