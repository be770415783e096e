#include "../device/signal.cuh"
#include "../network/leg_kernel.cuh"
#include "phase_leg.h"

namespace waybill::cuda {
namespace {

constexpr int threads = 256;

__device__ std::uint64_t epoch_of(const LegParams& p) { return p.state->epoch + 1; }

__global__ void __launch_bounds__(threads)
    phase_waits_kernel(const __grid_constant__ PhaseWaits phase) {
  const LegParams& p = phase.leg;
  const std::uint64_t epoch = epoch_of(p);
  if (epoch % 2 != p.parity)
    report_and_trap(p.sink, FaultKind::parity, p.rank, p.rank, p.parity, epoch, 0);
  for (int w = static_cast<int>(threadIdx.x); w < phase.count; w += threads) {
    const BatchSlot slot = phase.waits[w];
    if (slot.rank == p.world_size) {
      FaultSink sink = p.sink;
      sink.timeout_ns *= own_rows_patience;
      await(p.tables.ready + slot.slot, epoch, p.kind, p.rank, p.rank, sink);
    } else {
      await(p.slots + slot.slot, epoch, p.kind, p.rank, slot.rank, p.sink);
    }
  }
}

__global__ void __launch_bounds__(threads)
    phase_raises_kernel(const __grid_constant__ PhaseRaises phase) {
  const LegParams& p = phase.leg;
  const std::uint64_t epoch = epoch_of(p);
  // Whoever waits for what has not arrived says so when its deadline comes.
  const bool arrived = *static_cast<const volatile std::uint32_t*>(phase.given_up) == 0;
  __threadfence_system();
  const int count = phase.num_slots + phase.num_arrived;
  for (int i = static_cast<int>(threadIdx.x); arrived && i < count; i += threads) {
    std::uint64_t* const pad = i < phase.num_slots ? p.slots : p.arrivals;
    publish(pad + phase.which[i], epoch);
  }
  __syncthreads();  // all have read the epoch
  if (phase.ends && threadIdx.x == 0) p.state->epoch = epoch;
}

}  // namespace

cudaError_t prepare_phase_leg() {
  cudaFuncAttributes unused{};
  const cudaError_t status = cudaFuncGetAttributes(&unused, phase_waits_kernel);
  return status != cudaSuccess ? status : cudaFuncGetAttributes(&unused, phase_raises_kernel);
}

cudaError_t launch_phase_waits(const PhaseWaits& waits, cudaStream_t stream) {
  phase_waits_kernel<<<1, threads, 0, stream>>>(waits);
  return cudaGetLastError();
}

cudaError_t launch_phase_raises(const PhaseRaises& raises, cudaStream_t stream) {
  phase_raises_kernel<<<1, threads, 0, stream>>>(raises);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
