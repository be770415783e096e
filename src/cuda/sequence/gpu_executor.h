#pragma once

#include <memory>

#include "../network/network_leg.h"
#include "../rank/gpu_rank.h"
#include "waybill/runtime/executor.h"
#include "waybill/transport/transport.h"

namespace waybill::cuda {

/// Runs calls with the kernels of this room, on windows that are device memory.
/// @param share ranks on this rank's device; they divide its multiprocessors
/// @param leg what crosses between nodes goes with it; null on one node
[[nodiscard]] std::unique_ptr<Executor> make_gpu_executor(Transport& transport,
                                                          std::shared_ptr<GpuRank> gpu, int share,
                                                          std::unique_ptr<NetworkLeg> leg);

}  // namespace waybill::cuda
