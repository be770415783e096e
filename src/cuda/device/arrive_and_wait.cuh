#pragma once

#include "params.h"
#include "peers.cuh"
#include "signal.cuh"

namespace waybill::cuda {

/// This call's epoch. Every block asks once, before it is counted as done.
__device__ inline std::uint64_t begin_call(const ArriveParams& p) {
  const std::uint64_t epoch = p.state->epoch + 1;
  if (epoch % 2 != p.parity) {
    report_parity(p.sink, p.kind, p.rank, p.parity, epoch);
  }
  return epoch;
}

/// Rank k of those from this one on. @pre 0 <= k <= world_size
__device__ inline std::int32_t rank_after(const ArriveParams& p, std::int32_t k) {
  const std::int32_t r = p.rank + k;
  return r < p.world_size ? r : r - p.world_size;
}

/// Rank k of the node's from this one on. @pre 0 <= k < node_ranks
__device__ inline std::int32_t node_rank_after(const ArriveParams& p, std::int32_t k) {
  const std::int32_t r = p.rank + k;
  return r < p.first_rank + p.node_ranks ? r : r - p.node_ranks;
}

/// Says whether rank r sends the words of its call.
__device__ inline bool sends_call_words(const ArriveParams& p, std::int32_t r) {
  const bool of_node = p.first_rank <= r && r < p.first_rank + p.node_ranks;
  return of_node || p.fingerprint.crosses_nodes;
}

/// Returns the address at which this rank receives the words of rank r.
__device__ inline const std::uint64_t* call_words_at(const ArriveParams& p, std::uint64_t epoch,
                                                     std::int32_t r) {
  return words_at(p.own_arrivals, p.fingerprint, p.world_size, epoch, r);
}

/// Reports a wait that failed: a rank whose words differ, if there is one, beginning with `peer`;
/// otherwise that `peer` has not come.
[[noreturn]] __device__ __noinline__ inline void report_missed(const ArriveParams& p,
                                                               std::uint64_t epoch,
                                                               std::int32_t peer,
                                                               std::uint64_t seen,
                                                               std::uint64_t waited_ns) {
  report_disagreement(p, p.own_arrivals, epoch, peer, waited_ns);
  report_and_trap(p.sink, p.kind, p.rank, peer, epoch, seen, waited_ns);  // if none was
}

/// Calls for all other ranks of the node, from rank + 1 on, with their arrivals and their number.
/// One warp.
template <class Visit>
__device__ inline void for_node(const ArriveParams& p, Visit&& visit) {
  __syncwarp();
#pragma unroll 1  // few ranks, and no registers to spare
  for (std::int32_t k = 1 + static_cast<std::int32_t>(threadIdx.x % 32); k < p.node_ranks;
       k += 32) {
    visit(peer_at(p.arrivals, node_rank_after(p, k)));
  }
}

/// Sends the words of this rank's call to all other ranks of the node. Calls whose waits begin
/// before their end use it; others send them when they synchronize. One warp.
__device__ inline void send_call_words(const ArriveParams& p, std::uint64_t epoch,
                                       const CallWords& words) {
  for_node(p, [&](std::uint64_t* arrivals) {
    store_words(words_at(arrivals, p.fingerprint, p.world_size, epoch, p.rank), words, epoch);
  });
}

/// Signals to all other ranks of the node that this one has come to `epoch`, after all writes that
/// the lanes have made and seen. One warp.
__device__ inline void signal_arrival(const ArriveParams& p, std::uint64_t epoch) {
  for_node(p, [&](std::uint64_t* arrivals) { signal(arrivals + p.rank, epoch); });
}

/// Sends the words and signals. The words go out between the fence, which would wait for them, and
/// the arrival: a rank that sees the arrival need not wait for the words.
__device__ inline void signal_to_all(const ArriveParams& p, std::uint64_t epoch,
                                     const CallWords& words) {
  for_node(p, [&](std::uint64_t* arrivals) {
    fence_release();
    store_words(words_at(arrivals, p.fingerprint, p.world_size, epoch, p.rank), words, epoch);
    store_behind_fence(arrivals + p.rank, epoch);
  });
}
__device__ inline void signal_to_all(const ArriveParams& p, std::uint64_t epoch) {
  signal_to_all(p, epoch, load_call_words(p.fingerprint));
}

/// Waits until all other ranks have come to `epoch` with the same words. One warp; its lanes then
/// see the writes of those ranks.
__device__ inline void wait_all(const ArriveParams& p, std::uint64_t epoch, const CallWords& mine) {
#pragma unroll 1
  for (std::int32_t k = 1 + static_cast<std::int32_t>(threadIdx.x % 32); k < p.world_size;
       k += 32) {
    const std::int32_t peer = rank_after(p, k);
    const bool tells = sends_call_words(p, peer);
    const std::uint64_t* const peer_words = call_words_at(p, epoch, peer);
    std::uint64_t seen = 0;
    std::uint64_t differs = 0;
    spin_until(
        [&] {
          // The words are loaded first, so both loads are in flight together.
          differs = tells ? difference(mine, load_words(peer_words), epoch) : 0;
          seen = load_acquire(p.own_arrivals + peer);
          return (seen >= epoch && differs == 0) || is_disagreement(differs);
        },
        [&](std::uint64_t waited_ns) {
          if (is_over(p.sink, waited_ns)) report_missed(p, epoch, peer, seen, waited_ns);
        });
    if (differs != 0) report_missed(p, epoch, peer, seen, 0);
  }
  __syncwarp();
}
__device__ inline void wait_all(const ArriveParams& p, std::uint64_t epoch) {
  wait_all(p, epoch, load_call_words(p.fingerprint));
}

/// True in all threads of the block that comes last; it then sees the writes of the others. Each
/// thread's writes must be complete.
__device__ inline bool is_last_block(const ArriveParams& p) {
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

/// One thread of the last block: resets the counters for the next launch on the stream.
__device__ inline void end_call(const ArriveParams& p, std::uint64_t epoch) {
  p.state->blocks = 0;
  p.state->taken[0] = 0;
  p.state->taken[1] = 0;
  p.state->epoch = epoch;
}

/// The first warp of the last block ends the call when all ranks have come to its end.
/// @param has_words the other ranks already have the words
__device__ inline void arrive_and_wait_at_end(const ArriveParams& p, std::uint64_t epoch,
                                              const CallWords& words, bool has_words) {
  if (has_words) {
    signal_arrival(p, epoch);
  } else {
    signal_to_all(p, epoch, words);
  }
  wait_all(p, epoch, words);
  if (threadIdx.x == 0) end_call(p, epoch);
}

}  // namespace waybill::cuda
