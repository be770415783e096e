#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "waybill/core/error.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::test {

/// Makes worlds over NCCL in which each node says that it is a host of its own: NCCL then goes over
/// its network between nodes, here TCP on the loopback interface, and lets nodes share GPUs.
struct SimulatedHosts {
  std::int32_t ranks_per_node = 1;

  World operator()(std::shared_ptr<Bootstrap> bootstrap, int device) const {
    const auto node = concat("host-", to_int(bootstrap->rank()) / ranks_per_node);
    (void)setenv("NCCL_HOSTID", node.c_str(), 1);
    (void)setenv("NCCL_NET", "Socket", 0);
    (void)setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    (void)setenv("NCCL_NVLS_ENABLE", "0", 0);  // no multicast
    return make_gpu_process_world(std::move(bootstrap), device, ranks_per_node,
                                  NetworkBackend::nccl);
  }
};

}  // namespace waybill::test
