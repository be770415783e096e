#include "waybill/cuda/gpu_world.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "executor/cuda_check.h"
#include "executor/gpu_executor.h"
#include "executor/gpu_rank.h"
#include "transport/gpu_thread_transport.h"

namespace waybill {

int num_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return count;
}

World make_gpu_thread_world(std::shared_ptr<Bootstrap> bootstrap, int device,
                            std::int32_t ranks_per_node) {
  require(bootstrap != nullptr, "make_gpu_thread_world: bootstrap is null");
  require(0 <= device && device < num_gpus(), "make_gpu_thread_world: device = ", device,
          ", expected 0..", num_gpus() - 1);
  const std::int32_t world = bootstrap->world_size();
  const Topology topology{world, ranks_per_node == 0 ? world : ranks_per_node};
  topology.check();
  const auto devices = all_gather_value(*bootstrap, device, "gpu world: devices");
  const auto share = static_cast<int>(std::ranges::count(devices, device));
  auto gpu =
      std::make_shared<cuda::GpuRank>(bootstrap->rank(), topology, device, bootstrap->timeout_s());
  auto transport =
      cuda::make_gpu_thread_transport(std::move(bootstrap), ranks_per_node, gpu, share);
  auto executor = cuda::make_gpu_executor(*transport, std::move(gpu), share);
  return {std::move(transport), std::move(executor)};
}

void run_gpu_thread_world(std::int32_t world_size, const std::function<void(World&)>& body,
                          const ThreadWorldOptions& options) {
  const int gpus = num_gpus();
  if (gpus == 0) throw Unsupported("run_gpu_thread_world: there is no GPU");
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
