#pragma once

#include <memory>

#include "gpu_rank.h"
#include "waybill/runtime/executor.h"
#include "waybill/transport/transport.h"

namespace waybill::cuda {

/// Runs calls with the kernels of this room, on windows that are device memory.
/// @param share ranks on this rank's device; they divide its multiprocessors
[[nodiscard]] std::unique_ptr<Executor> make_gpu_executor(Transport& transport,
                                                          std::shared_ptr<GpuRank> gpu, int share);

}  // namespace waybill::cuda
