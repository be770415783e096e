#pragma once

#include <cstdint>

#include "word_size.h"

// Copies by loads and stores of threads.

namespace waybill::cuda {

/// Calls `use` with a word of that many bytes, see common_word. @return what it returns
#pragma nv_exec_check_disable  // a kernel calls it with device code, a launch with the host's
template <class Use>
__host__ __device__ __forceinline__ auto for_word(int word_bytes, Use&& use) {
  switch (word_bytes) {
    case 16:
      return use(uint4{});
    case 8:
      return use(uint2{});
    case 4:
      return use(std::uint32_t{});
    case 2:
      return use(std::uint16_t{});
    default:
      return use(std::uint8_t{});
  }
}

/// A thread's words first, first + Stride, ... as far as there are so many: on their way together.
template <int Stride, class Word, int Count, class Index>
__device__ __forceinline__ void load_batch(Word (&words)[Count], const Word* from, Index first,
                                           Index total) {
#pragma unroll
  for (int u = 0; u < Count; ++u) {
    if (first + u * Stride < total) words[u] = from[first + u * Stride];
  }
}
template <int Stride, class Word, int Count, class Index>
__device__ __forceinline__ void store_batch(Word* to, const Word (&words)[Count], Index first,
                                            Index total) {
#pragma unroll
  for (int u = 0; u < Count; ++u) {
    if (first + u * Stride < total) to[first + u * Stride] = words[u];
  }
}

}  // namespace waybill::cuda
