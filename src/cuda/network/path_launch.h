#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/params.h"
#include "path_params.h"

namespace waybill::cuda {

/// The addresses of the ranks' parts here; those of the rank's node are not used.
struct PeerAddresses {
  Peers<std::byte> windows;
  Peers<std::uint64_t> slots;  ///< slot 0
  Peers<std::uint64_t> arrivals;
};

/// The network path between ranks whose memory is mapped: puts are copies. @param bulk by bulk
/// copies (sm_90 and later), which take the shared memory of a multiprocessor; else by loads and
/// stores
cudaError_t prepare_peer_path(bool bulk);
cudaError_t launch_peer_path(const PathParams& params, const PeerAddresses& peers, bool bulk,
                             int num_sms, cudaStream_t stream);

// One launch takes so many.
inline constexpr int max_phase_waits = 256;
inline constexpr int max_phase_raises = 256;

/// Slots that must be raised before a phase.
struct PhaseWaits {
  PathParams path;
  const std::uint32_t* given_up;  ///< host memory: not 0: all later work is given up
  bool tells;                     ///< writes the words of this rank's call, which are sent
  std::int32_t count;
  BatchSlot waits[max_phase_waits];
};
static_assert(sizeof(PhaseWaits) <= 4096);

/// Slots that are raised after a phase.
struct PhaseRaises {
  PathParams path;
  const std::uint32_t* given_up;  ///< host memory: not 0: nothing has arrived
  std::int32_t num_slots;
  std::int32_t num_arrived;              ///< ranks, after the slots
  std::int32_t which[max_phase_raises];  ///< slots, then ranks
  bool ends;                             ///< the network path
};
static_assert(sizeof(PhaseRaises) <= 4096);

/// Launch the kernels before and after the work that the host queues for a phase.
cudaError_t prepare_phase_path();
cudaError_t launch_phase_waits(const PhaseWaits& waits, cudaStream_t stream);
cudaError_t launch_phase_raises(const PhaseRaises& raises, cudaStream_t stream);

}  // namespace waybill::cuda
