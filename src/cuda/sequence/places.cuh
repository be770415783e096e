#pragma once

#include "../device/peers.cuh"
#include "params.h"

// What an address of a plan names: a byte of a rank's window.

namespace waybill::cuda {

__device__ inline std::int32_t rank_of(std::uint64_t address) {
  return static_cast<std::int32_t>(address >> address_rank_shift);
}

__device__ inline std::byte* place_of(const SequenceParams& p, std::uint64_t address) {
  return peer_at(p.windows, rank_of(address)) + (address & address_offset_mask);
}

/// The same of an addend, which may be a sum.
__device__ inline const std::byte* addend_at(const SequenceParams& p, std::uint64_t address) {
  return place_of(p, address & ~address_sum_bit);
}

}  // namespace waybill::cuda
