#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "waybill/cuda/cuda_error.h"
#include "waybill/runtime/world.h"

namespace waybill {

/// GPUs that this process sees. 0 also where there is no driver.
[[nodiscard]] int num_gpus();

/// A rank of the world whose ranks are threads of this process, in the memory of GPUs that reach
/// each other's. Collective. Views then point to device memory, streams are cudaStream_t, and calls
/// return when their work is queued.
/// @param device the GPU of this rank; several ranks may have the same one
/// @param ranks_per_node 0: all ranks on one node
/// @throws InvalidArgument for a device that is not there, Unsupported for GPUs without peer access
///   to each other or more than 64 ranks, CudaError
[[nodiscard]] World make_gpu_thread_world(std::shared_ptr<Bootstrap> bootstrap, int device,
                                          std::int32_t ranks_per_node = 0);

/// Runs body(world) on one thread a rank and waits for all; rank r on GPU r modulo their number,
/// which is also the current device of its thread.
/// @throws as run_thread_world; Unsupported without a GPU
void run_gpu_thread_world(std::int32_t world_size, const std::function<void(World&)>& body,
                          const ThreadWorldOptions& options = {});

}  // namespace waybill
