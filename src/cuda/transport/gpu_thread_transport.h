#pragma once

#include <memory>

#include "../executor/gpu_rank.h"
#include "waybill/transport/transport.h"

namespace waybill::cuda {

/// Ranks are threads of one process, with the memory of GPUs that reach each other's.
[[nodiscard]] std::unique_ptr<Transport> make_gpu_thread_transport(
    std::shared_ptr<Bootstrap> bootstrap, Topology topology, std::shared_ptr<GpuRank> gpu);

}  // namespace waybill::cuda
