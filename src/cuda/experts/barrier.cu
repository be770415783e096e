#include "../device/peers.cuh"
#include "../device/signal.cuh"
#include "launch.h"

namespace waybill::cuda {
namespace {

/// One warp. The kernel counts the epoch, so that a graph may replay it.
__global__ void __launch_bounds__(32) barrier_kernel(const __grid_constant__ BarrierParams p) {
  const std::uint64_t epoch = *p.epoch + 1;
  __syncwarp();
  __threadfence_system();
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t i = lane; i < p.count; i += 32) {
    if (p.first + i != p.rank) signal(peer_at(p.peers, p.first + i) + p.rank, epoch);
  }
  for (std::int32_t i = lane; i < p.count; i += 32) {
    const std::int32_t peer = p.first + i;
    if (peer == p.rank) continue;
    wait_until(p.own + peer, epoch, FaultKind::barrier, p.rank, peer, p.sink);
  }
  __syncwarp();
  if (lane == 0) *p.epoch = epoch;
}

}  // namespace

cudaError_t prepare_barrier() { return load_kernels(barrier_kernel); }

cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream) {
  barrier_kernel<<<1, 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
