#pragma once

#include "meet.cuh"

// What ranks tell each other in words of 8 bytes, each with the number of the call in it: whoever
// sees that has the rest, and no signal has to follow.

namespace waybill::cuda {

__device__ inline void tell_word(std::uint64_t* at, std::int32_t value, std::uint64_t epoch) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at),
               "l"(epoch << count_epoch_shift |
                   static_cast<std::uint64_t>(static_cast<std::uint32_t>(value)))
               : "memory");
}

__device__ inline std::uint64_t load_word(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ inline bool is_told(std::uint64_t word, std::uint64_t epoch) {
  return word >> count_epoch_shift == static_cast<std::uint32_t>(epoch);
}

/// Waits for what rank r tells.
__device__ inline std::int32_t await_word(const RouteParams& p, std::int32_t r,
                                          const std::uint64_t* at, std::uint64_t epoch) {
  const std::uint64_t start = now_ns();
  for (;;) {
    const std::uint64_t word = load_word(at);
    if (is_told(word, epoch)) return static_cast<std::int32_t>(word);
    const std::uint64_t waited = now_ns() - start;
    if (is_over(p.m.meet.sink, waited)) {
      report_and_trap(p.m.meet.sink, p.m.meet.kind, p.shape.rank, r, epoch,
                      word >> count_epoch_shift, waited);
    }
  }
}

}  // namespace waybill::cuda
