#pragma once

#include "call.cuh"

// What ranks send each other in words of 8 bytes, each with the number of the call in it: whoever
// sees that has the rest, and no signal has to follow.

namespace waybill::cuda {

__device__ inline void store_flagged(std::uint64_t* at, std::int32_t value, std::uint64_t epoch) {
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

__device__ inline bool is_flagged(std::uint64_t word, std::uint64_t epoch) {
  return word >> count_epoch_shift == static_cast<std::uint32_t>(epoch);
}

/// Waits for what rank r sends. One that means another call does not send it: who waits looks at
/// that now and then.
__device__ inline std::int32_t wait_flagged(const RouteParams& p, std::int32_t r,
                                            const std::uint64_t* at, std::uint64_t epoch) {
  std::uint64_t word = 0;
  spin_until([&] { return is_flagged(word = load_word(at), epoch); },
             [&](std::uint64_t waited_ns) {
               look_up_from_wait(p.m.arrive, epoch, r, word >> count_epoch_shift, waited_ns);
             });
  return static_cast<std::int32_t>(word);
}

}  // namespace waybill::cuda
