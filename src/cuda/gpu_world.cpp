#include "waybill/cuda/gpu_world.h"

#include <cuda_runtime_api.h>

#include <utility>
#include <vector>

#include "device/params.h"
#include "gpu_report.h"
#include "rank/gpu_rank.h"
#include "sequence/executor.h"
#include "transport/gpu_place.h"
#include "transport/gpu_transport.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {

int num_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return count;
}

std::vector<DeviceFault> device_faults() { return cuda::reported_faults(); }

namespace {

using MakeTransport = std::function<std::unique_ptr<cuda::GpuTransport>(
    std::shared_ptr<Bootstrap>, std::shared_ptr<cuda::GpuRank>,
    const std::vector<cuda::GpuPlace>& places)>;

World make_rank(const char* who, std::shared_ptr<Bootstrap> bootstrap, int device,
                std::int32_t ranks_per_node, const MakeTransport& make_transport) {
  if (const std::string trouble = driver_trouble(); !trouble.empty()) {
    throw Unsupported(concat(who, ": ", trouble));
  }
  require(0 <= device && device < num_gpus(), who, ": device = ", device, ", expected 0..",
          num_gpus() - 1);
  const std::int32_t world = bootstrap->world_size();
  const Topology topology{world, ranks_per_node == 0 ? world : ranks_per_node};
  topology.check();
  if (world > cuda::max_gpu_ranks) {
    throw Unsupported(concat(who, ": ", world, " ranks, expected at most ", cuda::max_gpu_ranks));
  }
  auto gpu =
      std::make_shared<cuda::GpuRank>(bootstrap->rank(), topology, device, bootstrap->timeout_s());
  const auto places = cuda::exchange_places(*bootstrap, device);
  const int share = cuda::ranks_on_gpu_of(places, bootstrap->rank());
  if (cuda::shares_gpu_with_processes(places, bootstrap->rank())) gpu->share_with_processes();
  auto transport = make_transport(std::move(bootstrap), gpu, places);
  auto path = topology.num_nodes() > 1 ? transport->make_network_path() : nullptr;
  auto executor = cuda::make_gpu_executor(*transport, std::move(gpu), share, std::move(path));
  return {std::move(transport), std::move(executor)};
}

/// A rank that cannot have its device tells those that would wait for it.
World make_world(const char* who, const std::shared_ptr<Bootstrap>& bootstrap, int device,
                 std::int32_t ranks_per_node, const MakeTransport& make_transport) {
  require(bootstrap != nullptr, who, ": bootstrap is null");
  return fail_on_error(*bootstrap, [&] {
    return make_rank(who, bootstrap, device, ranks_per_node, make_transport);
  });
}

}  // namespace

World make_gpu_thread_world(std::shared_ptr<Bootstrap> bootstrap, int device,
                            std::int32_t ranks_per_node) {
  return make_world("make_gpu_thread_world", bootstrap, device, ranks_per_node,
                    [&](auto shared, auto gpu, const auto& places) {
                      const int share = cuda::ranks_on_gpu_of(places, shared->rank());
                      return cuda::make_gpu_thread_transport(std::move(shared), ranks_per_node,
                                                             std::move(gpu), places, share);
                    });
}

World make_gpu_process_world(std::shared_ptr<Bootstrap> bootstrap, int device,
                             std::int32_t ranks_per_node, NetworkBackend backend) {
  return make_world("make_gpu_process_world", bootstrap, device, ranks_per_node,
                    [&](auto shared, auto gpu, const auto& places) {
                      return cuda::make_gpu_process_transport(std::move(shared), ranks_per_node,
                                                              std::move(gpu), places, backend);
                    });
}

World make_nvshmem_world(std::shared_ptr<Bootstrap> bootstrap, int device,
                         std::int32_t ranks_per_node) {
  return make_world("make_nvshmem_world", bootstrap, device, ranks_per_node,
                    [&](auto shared, auto gpu, const auto& places) {
                      return cuda::make_nvshmem_transport(std::move(shared), ranks_per_node,
                                                          std::move(gpu), places);
                    });
}

void run_gpu_thread_world(std::int32_t world_size, const std::function<void(World&)>& body,
                          const ThreadWorldOptions& options) {
  const int gpus = num_gpus();
  if (gpus == 0) {
    const std::string trouble = driver_trouble();
    throw Unsupported(
        concat("run_gpu_thread_world: ", trouble.empty() ? "there is no GPU" : trouble));
  }
  run_ranks_as_threads(
      world_size,
      [&](std::shared_ptr<Bootstrap> bootstrap) {
        const int device = to_int(bootstrap->rank()) % gpus;
        World world = make_gpu_thread_world(std::move(bootstrap), device, options.ranks_per_node);
        body(world);
      },
      options.timeout_s);
}

}  // namespace waybill
