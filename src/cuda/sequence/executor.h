#pragma once

#include <memory>

#include "../network/network_path.h"
#include "../rank/gpu_rank.h"
#include "runtime/executor.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// Runs calls with the kernels of this module, on windows that are device memory.
/// @param share ranks on this rank's device; they divide its multiprocessors
/// @param path what crosses between nodes goes with it; null on one node
[[nodiscard]] std::unique_ptr<Executor> make_gpu_executor(Transport& transport,
                                                          std::shared_ptr<GpuRank> gpu, int share,
                                                          std::unique_ptr<NetworkPath> path);

}  // namespace waybill::cuda
