#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

inline constexpr int widest_word = 16;  ///< bytes that a thread loads at once

/// Returns the widest word of which the addresses and sizes are multiples. @param bits addresses
/// and sizes, or-ed
__host__ __device__ constexpr int common_word(std::uint64_t bits) {
  const auto low = static_cast<unsigned>(bits | widest_word);
  return static_cast<int>(low & (~low + 1));
}

}  // namespace waybill::cuda
