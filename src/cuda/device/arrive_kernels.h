#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace waybill::cuda {

/// Loads these kernels into the context of the current device, see prepare_dispatch_tma().
cudaError_t prepare_arrive_and_wait();

/// Ends a call whose rows another engine moved: raises this rank's slots and waits for the others.
cudaError_t launch_arrive_and_wait(const ArriveParams& params, cudaStream_t stream);

/// Makes an empty call if the next epoch has another parity than `params`: windows alternate, and a
/// graph with an odd number of calls would use the same one again.
cudaError_t launch_realign(const ArriveParams& params, cudaStream_t stream);

/// Parameters of a barrier between ranks [first, first + count). Rank r raises slot r in the
/// signals of each other rank.
struct BarrierParams {
  std::int32_t rank;
  std::int32_t first;
  std::int32_t count;
  std::uint64_t* epoch;  ///< number of barriers that have ended, on this device
  FaultSink sink;
  std::uint64_t* own;          ///< this rank's slots
  Peers<std::uint64_t> peers;  ///< slots of each rank
};

/// Lets these ranks wait for each other. It counts the epoch, so that a graph may replay it.
cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream);

/// Raises a flag.
cudaError_t launch_signal(std::uint64_t* flag, std::uint64_t epoch, cudaStream_t stream);

/// Waits for a flag, with the deadline of `sink`.
cudaError_t launch_wait(const FlagWait& wait, const FaultSink& sink, cudaStream_t stream);

}  // namespace waybill::cuda
