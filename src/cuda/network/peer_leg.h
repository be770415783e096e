#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "../executor/gpu_rank.h"
#include "../kernel/sequence_params.h"
#include "leg_params.h"
#include "network_leg.h"

namespace waybill::cuda {

/// Where the ranks' parts are mapped here; those of the rank's node are not used.
struct PeerAddresses {
  std::byte* windows[max_gpu_ranks];
  std::uint64_t* slots[max_gpu_ranks];     ///< slot 0
  std::uint64_t* arrivals[max_gpu_ranks];  ///< slot of this rank
};

cudaError_t prepare_peer_leg();
cudaError_t launch_peer_leg(const LegParams& params, const PeerAddresses& peers, int num_sms,
                            cudaStream_t stream);

/// Between logical nodes whose memory is mapped: a kernel that copies.
/// @param share ranks on this device
[[nodiscard]] std::unique_ptr<NetworkLeg> make_peer_leg(std::shared_ptr<GpuRank> gpu,
                                                        Topology topology, int share);

}  // namespace waybill::cuda
