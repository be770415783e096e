// Streams that come late. With WAYBILL_TEST=late_streams=SEED a stream of which the library records
// an event has nothing to do for a while behind it: what another stream, or the host, reads or
// overwrites without waiting for it is then another result. The linker puts this in place of
// cudaEventRecord (--wrap).

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "core/test_hooks.h"

namespace {

constexpr std::uint64_t kMostNs = 1'000'000;

__global__ void linger(std::uint64_t ns) {
  std::uint64_t start = 0;
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < ns);
}

/// The next random number of a seed: splitmix64.
std::uint64_t draw(std::uint64_t seed) {
  static std::atomic<std::uint64_t> count{0};
  std::uint64_t x = seed * 0x2545F4914F6CDD1DU + ++count * 0x9E3779B97F4A7C15U;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return x ^ x >> 31;
}

}  // namespace

extern "C" {

cudaError_t __real_cudaEventRecord(cudaEvent_t event, cudaStream_t stream);

cudaError_t __wrap_cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const cudaError_t recorded = __real_cudaEventRecord(event, stream);
  const std::int64_t seed = waybill::detail::test_hooks().late_streams;
  if (seed == 0 || recorded != cudaSuccess) return recorded;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // another stream captures
    return recorded;
  }
  if (capturing == cudaStreamCaptureStatusNone) {
    linger<<<1, 1, 0, stream>>>(draw(seed) % kMostNs);
  }
  return recorded;
}
}
