#include "arrive_and_wait.cuh"
#include "arrive_kernels.h"
#include "peers.cuh"

namespace waybill::cuda {
namespace {

__global__ void __launch_bounds__(32)
    arrive_and_wait_kernel(const __grid_constant__ ArriveParams p) {
  const std::uint64_t epoch = begin_call(p);
  __syncwarp();
  signal_to_all(p, epoch);
  wait_all(p, epoch);
  if (threadIdx.x == 0) end_call(p, epoch);
}

__global__ void __launch_bounds__(32) realign_kernel(const __grid_constant__ ArriveParams p) {
  const std::uint64_t epoch = p.state->epoch + 1;
  if (epoch % 2 == p.parity) return;
  signal_to_all(p, epoch);
  wait_all(p, epoch);
  if (threadIdx.x == 0) end_call(p, epoch);
}

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

__global__ void signal_kernel(std::uint64_t* flag, std::uint64_t epoch) {
  __threadfence_system();
  signal(flag, epoch);
}

__global__ void wait_kernel(FlagWait wait, FaultSink sink) {
  wait_until(wait.flag, wait.wanted, FaultKind::wait, wait.rank, wait.peer, sink);
  *wait.seen = load_acquire(wait.flag);
}

}  // namespace

cudaError_t prepare_arrive_and_wait() {
  cudaFuncAttributes unused{};
  for (const void* kernel :
       {reinterpret_cast<const void*>(arrive_and_wait_kernel),
        reinterpret_cast<const void*>(realign_kernel),
        reinterpret_cast<const void*>(barrier_kernel), reinterpret_cast<const void*>(signal_kernel),
        reinterpret_cast<const void*>(wait_kernel)}) {
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_arrive_and_wait(const ArriveParams& params, cudaStream_t stream) {
  arrive_and_wait_kernel<<<1, 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_realign(const ArriveParams& params, cudaStream_t stream) {
  realign_kernel<<<1, 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream) {
  barrier_kernel<<<1, 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_signal(std::uint64_t* flag, std::uint64_t epoch, cudaStream_t stream) {
  signal_kernel<<<1, 1, 0, stream>>>(flag, epoch);
  return cudaGetLastError();
}

cudaError_t launch_wait(const FlagWait& wait, const FaultSink& sink, cudaStream_t stream) {
  wait_kernel<<<1, 1, 0, stream>>>(wait, sink);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
