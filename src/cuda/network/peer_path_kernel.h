#pragma once

#include <cuda_runtime_api.h>

#include "../device/arrive_params.h"
#include "path_params.h"

namespace waybill::cuda {

/// Where the ranks' parts are mapped here; those of the rank's node are not used.
struct PeerAddresses {
  std::byte* windows[max_gpu_ranks];
  std::uint64_t* slots[max_gpu_ranks];     ///< slot 0
  std::uint64_t* arrivals[max_gpu_ranks];  ///< slot of this rank
};

/// The network path between ranks whose memory is mapped: puts are copies.
cudaError_t prepare_peer_path();
cudaError_t launch_peer_path(const PathParams& params, const PeerAddresses& peers, int num_sms,
                             cudaStream_t stream);

}  // namespace waybill::cuda
