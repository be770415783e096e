#pragma once

#include <cstdint>

// Lanes of a warp.

namespace waybill::cuda {

inline constexpr unsigned all_lanes = 0xFFFFFFFFU;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % 32); }

/// Whether this lane is the first of some.
__device__ inline bool is_first(unsigned lanes) {
  return lane_id() == __ffs(static_cast<int>(lanes)) - 1;
}

/// Lanes with topk slots of the same token as this one, where lanes hold topk slots in order.
/// @param k this lane's topk slot of it
__device__ inline unsigned lanes_of_token(std::int32_t topk, std::int32_t k) {
  const unsigned of_first = topk == 32 ? all_lanes : (1U << topk) - 1;
  return of_first << (lane_id() - k);
}

/// Bits of the numbers 0..most.
__device__ inline int bits_of(std::int32_t most) { return 32 - __clz(most); }

/// Lanes with the same value of so many bits, ballot by ballot: __match_any_sync takes one value
/// after the other, an order of magnitude longer where they differ.
__device__ inline unsigned lanes_with(std::int32_t value, int bits) {
  unsigned same = all_lanes;
#pragma unroll 4
  for (int b = 0; b < bits; ++b) {
    const bool is_set = (value >> b & 1) != 0;
    const unsigned set = __ballot_sync(all_lanes, is_set);
    same &= is_set ? set : ~set;
  }
  return same;
}

}  // namespace waybill::cuda
