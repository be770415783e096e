#pragma once

#include "call.cuh"
#include "params.h"

// Rows of other nodes come chunk by chunk.

namespace waybill::cuda {

/// The slot of the chunk of a node's token.
__device__ inline const std::uint64_t* slot_of_token(const ChunkSlots& slots, std::int32_t node,
                                                     std::int32_t token) {
  return slots.first + std::int64_t{node} * slots.node_stride + (token >> slots.shift);
}

/// Waits until a node's token is here. One warp, all lanes with the same one.
/// @param s of the world
__device__ inline void wait_chunk(const ArriveParams& arrive, const MoeShape& s,
                                  const ChunkSlots& slots, std::int32_t node, std::int32_t token,
                                  std::uint64_t epoch) {
  if (threadIdx.x % 32 == 0) {
    const std::int32_t peer = node * s.node_ranks + s.rank - s.first_rank;
    wait_slot(arrive, slot_of_token(slots, node, token), epoch, peer);
  }
  __syncwarp();
}

}  // namespace waybill::cuda
