#pragma once

#include "../device/arrive_and_wait.cuh"
#include "delay.cuh"
#include "params.h"

namespace waybill::cuda {

/// Whether the last call of this kind had the parity that the next one has.
__device__ inline bool is_off_parity(const MoeArrive& m, int kind, std::uint32_t next) {
  return m.state->last_parity[kind] == next + 1;
}

/// The epoch of a call that begins with this kernel. Every block asks once.
__device__ inline std::uint64_t begin_moe_call(const MoeArrive& m, int kind) {
  end_if_reported(m.arrive.sink);
  const std::uint64_t epoch = m.state->call.epoch + 1;
  const bool is_off = is_off_parity(m, kind, m.parity);  // asked for with the epoch
  linger(m, DelayPoint::rank, epoch);
  if (is_off) {
    report_parity(m.arrive.sink, m.arrive.kind, m.arrive.rank, m.parity, epoch);
  }
  return epoch;
}

/// One thread of the last block.
__device__ inline void end_moe_call(const MoeArrive& m, int kind, std::uint64_t epoch) {
  m.state->last_parity[kind] = m.parity + 1;
  m.state->arrived_blocks = 0;
  end_call(m.arrive, epoch);
}

__device__ inline unsigned num_blocks() { return gridDim.x * gridDim.y; }
__device__ inline unsigned block_idx() { return blockIdx.y * gridDim.x + blockIdx.x; }

/// True in thread 0 of the block that comes last: all others have done their part.
__device__ inline bool comes_last(MoeState* state) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  if (num_blocks() == 1) return true;
  __threadfence();
  return atomicAdd(&state->call.blocks, 1ULL) == num_blocks() - 1;
}

/// All blocks of the kernel wait for each other; once a kernel. They see what each had written.
__device__ inline void wait_blocks(const MoeArrive& m) {
  const unsigned blocks = num_blocks();
  if (blocks == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(&m.state->arrived_blocks, 1U);
    std::uint32_t seen = 0;
    spin_until(
        [&] {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                       : "=r"(seen)
                       : "l"(&m.state->arrived_blocks)
                       : "memory");
          return seen >= blocks;
        },
        [&](std::uint64_t waited_ns) {
          if (is_over(m.arrive.sink, waited_ns)) {
            report_and_trap(m.arrive.sink, m.arrive.kind, m.arrive.rank, m.arrive.rank, blocks,
                            seen, waited_ns);
          }
          end_if_reported(m.arrive.sink);
        });
  }
  __syncthreads();
}

/// For other kernels of this device. What was written before is seen with it only behind a fence.
__device__ inline void store_relaxed(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

/// The same with what this thread has written and seen before. Pairs with CallBegin.
__device__ inline void store_released(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

/// Lets the kernel behind this one on the stream take its place on the device, if it was launched
/// to do so, and sends it the epoch of the call. Its start alone says nothing: griddepcontrol
/// orders no memory, so who does not wait for this kernel's end waits for the word. All threads,
/// behind wait_earlier_kernel(): the first that gives the place away speaks for its block.
__device__ inline void let_next_begin(const MoeArrive& m, std::uint64_t epoch) {
  const bool tells = block_idx() == 0 && threadIdx.x == 0;
  if (tells && m.most_delay_ns == 0) store_released(&m.state->begun, epoch);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  if (tells && m.most_delay_ns != 0) {
    linger(m, DelayPoint::begun, epoch);
    store_released(&m.state->begun, epoch);
  }
}

/// Waits until the kernel before this one on the stream has ended, where this one was launched
/// early.
__device__ inline void wait_earlier_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Whether a rank has said that it means another call.
__device__ inline bool means_another_call(const ArriveParams& p, std::uint64_t epoch,
                                          std::int32_t peer) {
  return means_otherwise(load_call_words(p.fingerprint), load_words(call_words_at(p, epoch, peer)),
                         epoch);
}

/// For waits for a peer: it reports if that means another call, as such a one may never come, or
/// if the wait is over.
__device__ __noinline__ inline void look_up_from_wait(const ArriveParams& p, std::uint64_t epoch,
                                                      std::int32_t peer, std::uint64_t seen,
                                                      std::uint64_t waited_ns) {
  if (means_another_call(p, epoch, peer) || is_over(p.sink, waited_ns)) {
    report_missed(p, epoch, peer, seen, waited_ns);
  }
}

/// Waits for a slot that counts in steps below an epoch; reports speak of epochs.
/// @return what it came to
__device__ inline std::uint64_t wait_epoch(const ArriveParams& p, const std::uint64_t* slot,
                                           std::uint64_t wanted, int epoch_shift,
                                           std::int32_t peer) {
  std::uint64_t seen = 0;
  spin_until([&] { return (seen = load_acquire(slot)) >= wanted; },
             [&](std::uint64_t waited_ns) {
               look_up_from_wait(p, wanted >> epoch_shift, peer, seen >> epoch_shift, waited_ns);
             });
  return seen;
}

/// The same for one that counts epochs.
__device__ inline void wait_slot(const ArriveParams& p, const std::uint64_t* slot,
                                 std::uint64_t epoch, std::int32_t peer) {
  (void)wait_epoch(p, slot, epoch, 0, peer);
}

/// Waits until all other ranks have come to `epoch`. What they mean by the call is left to
/// CallComparison. One warp; its lanes see what the ranks wrote.
__device__ inline void wait_arrivals(const ArriveParams& p, std::uint64_t epoch) {
#pragma unroll 1
  for (std::int32_t k = 1 + static_cast<std::int32_t>(threadIdx.x % 32); k < p.world_size;
       k += 32) {
    const std::int32_t peer = rank_after(p, k);
    wait_slot(p, p.own_arrivals + peer, epoch, peer);
  }
  __syncwarp();
}

/// The warp that sends and compares what a call means: not one of those with the most to do.
__device__ inline bool compares_calls() {
  return block_idx() == 0 && threadIdx.x / 32 == blockDim.x / 32 - 1;
}

/// All ranks have come to the call. What this one means by it goes out behind its arrival, so that
/// nobody waits for that; CallComparison looks at it. All threads.
__device__ inline void arrive_and_wait(const ArriveParams& p, std::uint64_t epoch) {
  if (threadIdx.x < 32) {
    if (blockIdx.x == 0) {
      signal_arrival(p, epoch);
      send_call_words(p, epoch, load_call_words(p.fingerprint));
    }
    wait_arrivals(p, epoch);
  }
  __syncthreads();
}

/// What the ranks of the node mean by a call: asked for early, looked at late,
/// so that nobody waits for it. A lane a rank; one warp.
class CallComparison {
 public:
  /// Asks, if this warp compares. Words may still be on their way: settle() asks again.
  __device__ CallComparison(const ArriveParams& p, std::uint64_t epoch, bool compares)
      : epoch_(epoch), theirs_{} {
    const std::int32_t first = 1 + static_cast<std::int32_t>(threadIdx.x % 32);
    if (compares && first < p.world_size) {
      theirs_ = load_words(call_words_at(p, epoch, rank_after(p, first)));
    }
  }

  /// Ends the kernel if one of them means another call.
  __device__ void settle(const ArriveParams& p) {
    const CallWords mine = load_call_words(p.fingerprint);
    const std::int32_t first = 1 + static_cast<std::int32_t>(threadIdx.x % 32);
#pragma unroll 1
    for (std::int32_t k = first; k < p.world_size; k += 32) {
      const std::int32_t peer = rank_after(p, k);
      if (!sends_call_words(p, peer)) continue;
      if (k != first) theirs_ = load_words(call_words_at(p, epoch_, peer));
      std::uint64_t differs = difference(mine, theirs_, epoch_);
      const auto is_told = [&] { return differs == 0 || is_disagreement(differs); };
      if (!is_told()) {
        spin_until(
            [&] {
              theirs_ = load_words(call_words_at(p, epoch_, peer));
              differs = difference(mine, theirs_, epoch_);
              return is_told();
            },
            [&](std::uint64_t waited_ns) {
              if (is_over(p.sink, waited_ns)) {
                report_missed(p, epoch_, peer, epoch_ - 1, waited_ns);
              }
            });
      }
      if (differs != 0) report_missed(p, epoch_, peer, epoch_ - 1, 0);
    }
  }

 private:
  std::uint64_t epoch_;
  CallWords theirs_;
};

}  // namespace waybill::cuda
