#pragma once

#include "../device/signal.cuh"
#include "sequence_params.h"

namespace waybill::cuda {

/// This call's epoch. Every block asks once, before it is counted as done.
__device__ inline std::uint64_t begin_call(const MeetParams& p) {
  const std::uint64_t epoch = p.state->epoch + 1;
  if (epoch % 2 != p.parity) {
    report_and_trap(p.sink, FaultKind::parity, p.rank, p.rank, p.parity, epoch, 0);
  }
  return epoch;
}

/// Tells all other ranks of the node, from rank + 1 on, that this one has come to `epoch`. One
/// warp, with all that its lanes have written and seen.
__device__ inline void publish_to_all(const MeetParams& p, std::uint64_t epoch) {
  __syncwarp();
  for (std::int32_t k = 1 + static_cast<std::int32_t>(threadIdx.x % 32); k < p.world_size;
       k += 32) {
    std::uint64_t* const peer = p.peer_arrivals[(p.rank + k) % p.world_size];
    if (peer != nullptr) publish(peer + p.rank, epoch);
  }
}

/// Waits until all other ranks have come to `epoch`. One warp; its lanes see what the ranks wrote.
__device__ inline void await_all(const MeetParams& p, std::uint64_t epoch) {
  for (std::int32_t k = 1 + static_cast<std::int32_t>(threadIdx.x % 32); k < p.world_size;
       k += 32) {
    const std::int32_t peer = (p.rank + k) % p.world_size;
    await(p.own_arrivals + peer, epoch, p.kind, p.rank, peer, p.sink);
  }
  __syncwarp();
}

/// True in all threads of the block that comes last; it has then seen what the others wrote. Each
/// thread's writes must be complete.
__device__ inline bool is_last_block(const MeetParams& p) {
  __shared__ bool last;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&p.state->blocks, 1ULL) == gridDim.x - 1;
    __threadfence();  // other blocks are on this device
  }
  __syncthreads();
  return last;
}

/// One thread of the last block: the next launch on the stream finds everything as this one did.
__device__ inline void end_call(const MeetParams& p, std::uint64_t epoch) {
  p.state->blocks = 0;
  p.state->taken[0] = 0;
  p.state->taken[1] = 0;
  p.state->epoch = epoch;
}

}  // namespace waybill::cuda
