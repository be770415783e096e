#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace waybill::cuda {

/// Loads these kernels into the context of the current device, see prepare_dispatch_tma().
cudaError_t prepare_arrive_and_wait();

/// Ends a call whose rows went by other means: raises this rank's slots and waits for the others.
cudaError_t launch_arrive_and_wait(const ArriveParams& params, cudaStream_t stream);

/// An empty call, if the next epoch is not of the parity in `params`: windows alternate, and
/// a graph with an odd number of calls takes the same one again.
cudaError_t launch_realign(const ArriveParams& params, cudaStream_t stream);

/// Raises a flag.
cudaError_t launch_signal(std::uint64_t* flag, std::uint64_t epoch, cudaStream_t stream);

/// One rank's wait for a flag that another raises.
struct FlagWait {
  const std::uint64_t* flag;
  std::uint64_t wanted;
  std::int32_t rank;
  std::int32_t peer;
  std::uint64_t* seen;  ///< pinned host memory: the flag in the end
};

/// Waits for a flag, with the deadline of `sink`.
cudaError_t launch_wait(const FlagWait& wait, const FaultSink& sink, cudaStream_t stream);

}  // namespace waybill::cuda
