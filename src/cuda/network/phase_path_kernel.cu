#include "../device/signal.cuh"
#include "path_kernel.cuh"
#include "path_launch.h"

namespace waybill::cuda {
namespace {

constexpr int threads = 256;

__device__ std::uint64_t epoch_of(const PathParams& p) { return p.state->epoch + 1; }

__device__ bool is_given_up(const std::uint32_t* flag) {
  return *static_cast<const volatile std::uint32_t*>(flag) != 0;
}

/// Without a trap this kernel must not end before the host has given up the later work, which would
/// send rows that are not there.
__device__ void report_and_stay(const PhaseWaits& phase, const FaultSink& sink, std::int32_t peer,
                                std::uint64_t wanted, std::uint64_t seen, std::uint64_t waited_ns,
                                FaultKind kind) {
  const PathParams& path = phase.path;
  const bool of_peer = kind != FaultKind::parity && peer != path.rank;
  if (of_peer && path.arrivals != nullptr)
    report_disagreement(path, path.arrivals, wanted, peer, waited_ns);
  report(sink, kind, path.rank, peer, wanted, seen, waited_ns, path.kind);
  if (sink.traps) end_context(sink);
  while (!is_given_up(phase.given_up)) __nanosleep(100'000);
}

__device__ void wait_slot(const PhaseWaits& phase, const std::uint64_t* flag, std::uint64_t wanted,
                          std::int32_t peer, const FaultSink& sink) {
  std::uint64_t seen = 0;
  spin_until([&] { return (seen = load_acquire(flag)) >= wanted || is_given_up(phase.given_up); },
             [&](std::uint64_t waited_ns) {
               if (is_over(sink, waited_ns)) {
                 report_and_stay(phase, sink, peer, wanted, seen, waited_ns, phase.path.kind);
               }
             });
}

__global__ void __launch_bounds__(threads)
    phase_waits_kernel(const __grid_constant__ PhaseWaits phase) {
  const PathParams& p = phase.path;
  const std::uint64_t epoch = epoch_of(p);
  if (epoch % 2 != p.parity)
    report_and_stay(phase, p.sink, p.rank, p.parity, epoch, 0, FaultKind::parity);
  if (phase.tells && threadIdx.x == 0) {
    store_words(words_at(p.arrivals, p.fingerprint, p.world_size, epoch, p.rank),
                load_call_words(p.fingerprint), epoch);
  }
  for (int w = static_cast<int>(threadIdx.x); w < phase.count; w += threads) {
    const BatchSlot slot = phase.waits[w];
    if (slot.rank == p.world_size) {
      FaultSink sink = p.sink;
      sink.timeout_ns *= own_rows_patience;
      wait_slot(phase, p.tables.ready + slot.slot, epoch, p.rank, sink);
    } else {
      wait_slot(phase, p.slots + slot.slot, epoch, slot.rank, p.sink);
    }
  }
}

__global__ void __launch_bounds__(threads)
    phase_raises_kernel(const __grid_constant__ PhaseRaises phase) {
  const PathParams& p = phase.path;
  const std::uint64_t epoch = epoch_of(p);
  // Whoever waits for what has not arrived says so when its deadline comes.
  const bool arrived = !is_given_up(phase.given_up);
  __threadfence_system();
  const int count = phase.num_slots + phase.num_arrived;
  for (int i = static_cast<int>(threadIdx.x); arrived && i < count; i += threads) {
    std::uint64_t* const pad = i < phase.num_slots ? p.slots : p.arrivals;
    signal(pad + phase.which[i], epoch);
  }
  __syncthreads();  // all have read the epoch
  if (phase.ends && threadIdx.x == 0) p.state->epoch = epoch;
}

}  // namespace

cudaError_t prepare_phase_path() {
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
