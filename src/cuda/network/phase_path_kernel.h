#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "path_params.h"

namespace waybill::cuda {

inline constexpr int max_phase_waits = 256;   ///< of one launch
inline constexpr int max_phase_raises = 256;  ///< of one launch

/// What must be raised before a phase.
struct PhaseWaits {
  PathParams path;
  const std::uint32_t* given_up;  ///< host memory: not 0: nothing behind this is done any more
  bool tells;                     ///< writes what this rank means by the call, to be sent
  std::int32_t count;
  BatchSlot waits[max_phase_waits];
};
static_assert(sizeof(PhaseWaits) <= 4096);

/// What is raised behind a phase.
struct PhaseRaises {
  PathParams path;
  const std::uint32_t* given_up;  ///< host memory: not 0: nothing has arrived
  std::int32_t num_slots;
  std::int32_t num_arrived;              ///< ranks, behind the slots
  std::int32_t which[max_phase_raises];  ///< slots, then ranks
  bool ends;                             ///< the network path
};
static_assert(sizeof(PhaseRaises) <= 4096);

/// The kernels around what the host queues for a phase.
cudaError_t prepare_phase_path();
cudaError_t launch_phase_waits(const PhaseWaits& waits, cudaStream_t stream);
cudaError_t launch_phase_raises(const PhaseRaises& raises, cudaStream_t stream);

}  // namespace waybill::cuda
