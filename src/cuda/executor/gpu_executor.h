#pragma once

#include <memory>

#include "../transport/gpu_transport.h"
#include "gpu_rank.h"
#include "waybill/runtime/executor.h"

namespace waybill::cuda {

/// Runs calls with the kernels of this room, on windows that are device memory.
/// @param share ranks on this rank's device; they divide its multiprocessors
[[nodiscard]] std::unique_ptr<Executor> make_gpu_executor(GpuTransport& transport,
                                                          std::shared_ptr<GpuRank> gpu, int share);

}  // namespace waybill::cuda
