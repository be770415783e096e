#pragma once

#include "../device/signal.cuh"
#include "params.h"

// For tests: kernels linger where a call must not depend on who is faster, each time for another
// while. Elsewhere that is a branch on a kernel's parameter.

namespace waybill::cuda {

enum class DelayPoint : std::uint32_t {
  rank,    ///< all blocks of a rank, as a call begins
  begun,   ///< the word that says that a call has begun
  placed,  ///< the words that say that tokens are placed
  block,   ///< a block that sends, receives or sums rows
};

/// Each bit depends on all bits of x.
__device__ inline std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352DU;
  x = (x ^ x >> 15) * 0x846CA68BU;
  return x ^ x >> 16;
}

/// Every other time up to `most_delay_ns`.
__device__ __noinline__ inline void linger_at(const MoeArrive& m, DelayPoint point,
                                              std::uint64_t what) {
  const auto place =
      static_cast<std::uint32_t>(m.arrive.rank) * 4 + static_cast<std::uint32_t>(point);
  const std::uint32_t drawn = mixed(mixed(place + 1) + static_cast<std::uint32_t>(what));
  if ((drawn & 1U) == 0) return;
  const std::uint64_t ns = std::uint64_t{drawn >> 1U} * m.most_delay_ns >> 31U;
  const std::uint64_t start = now_ns();
  while (now_ns() - start < ns) __nanosleep(200);
}

/// @param what is the same for threads that linger together
__device__ inline void linger(const MoeArrive& m, DelayPoint point, std::uint64_t what) {
  if (m.most_delay_ns != 0) linger_at(m, point, what);
}

/// The blocks of a rank each for themselves.
__device__ inline void linger_block(const MoeArrive& m) {
  if (m.most_delay_ns != 0) {
    linger_at(m, DelayPoint::block, (now_ns() >> 14U) * gridDim.x + blockIdx.x);
  }
}

}  // namespace waybill::cuda
