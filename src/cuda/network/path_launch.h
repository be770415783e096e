#pragma once

#include <cuda_runtime_api.h>

#include "../device/peers.h"
#include "path_params.h"

namespace waybill::cuda {

/// Where the ranks' parts are mapped here; those of the rank's node are not used.
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

}  // namespace waybill::cuda
