#pragma once

#include <cuda_runtime_api.h>

#include "../device/meet_params.h"
#include "leg_params.h"

namespace waybill::cuda {

/// Where the ranks' parts are mapped here; those of the rank's node are not used.
struct PeerAddresses {
  std::byte* windows[max_gpu_ranks];
  std::uint64_t* slots[max_gpu_ranks];     ///< slot 0
  std::uint64_t* arrivals[max_gpu_ranks];  ///< slot of this rank
};

/// The leg between ranks whose memory is mapped: puts are copies.
cudaError_t prepare_peer_leg();
cudaError_t launch_peer_leg(const LegParams& params, const PeerAddresses& peers, int num_sms,
                            cudaStream_t stream);

}  // namespace waybill::cuda
