#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "waybill/core/error.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::test {

/// Makes worlds over NCCL in which NCCL takes each rank for a host of its own: it then goes over
/// its network, here TCP on the loopback interface, and lets all ranks share one GPU.
struct SimulatedHosts {
  std::int32_t ranks_per_node = 1;

  World operator()(std::shared_ptr<Bootstrap> bootstrap, int device) const {
    const auto host = concat("host-", bootstrap->rank());
    (void)setenv("NCCL_HOSTID", host.c_str(), 1);
    (void)setenv("NCCL_NET", "Socket", 0);
    (void)setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    (void)setenv("NCCL_NVLS_ENABLE", "0", 0);  // no multicast
    return make_gpu_process_world(std::move(bootstrap), device, ranks_per_node,
                                  NetworkBackend::nccl);
  }
};

}  // namespace waybill::test
