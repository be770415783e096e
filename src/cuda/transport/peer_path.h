#pragma once

#include <memory>

#include "../network/network_path.h"
#include "../rank/gpu_rank.h"

namespace waybill::cuda {

/// Between logical nodes whose memory is mapped: a kernel that copies.
/// @param share ranks on this device
[[nodiscard]] std::unique_ptr<NetworkPath> make_peer_path(std::shared_ptr<GpuRank> gpu,
                                                          Topology topology, int share);

}  // namespace waybill::cuda
