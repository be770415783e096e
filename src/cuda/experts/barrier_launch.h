#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/fault.h"
#include "../device/peers.h"

namespace waybill::cuda {

/// Ranks [first, first + count) wait for each other. Slot r of a rank's signals is raised by rank
/// r of the world.
struct BarrierParams {
  std::int32_t rank;
  std::int32_t first;
  std::int32_t count;
  std::uint64_t* epoch;  ///< of the last one that has ended, on this device
  FaultSink sink;
  std::uint64_t* own;          ///< this rank's slots
  Peers<std::uint64_t> peers;  ///< those of each rank
};

/// Loads the kernel into the context of the current device.
cudaError_t prepare_barrier();

cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream);

}  // namespace waybill::cuda
