#pragma once

#include "word_size.h"

// Copies by loads and stores of threads.

namespace waybill::cuda {

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
