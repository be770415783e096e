#pragma once

#include "../kernel/meet.cuh"
#include "moe_params.h"

namespace waybill::cuda {

/// Whether the last call of this kind had the turn that the next one has.
__device__ inline bool is_off_turn(const MoeMeet& m, int kind, std::uint32_t next) {
  return m.state->last_turn[kind] == next + 1;
}

/// The epoch of a call that begins with this kernel. Every block asks once.
__device__ inline std::uint64_t begin_moe_call(const MoeMeet& m, int kind) {
  const std::uint64_t epoch = m.state->call.epoch + 1;
  if (is_off_turn(m, kind, m.turn)) {
    report_and_trap(m.meet.sink, FaultKind::parity, m.meet.rank, m.meet.rank, m.turn, epoch, 0);
  }
  return epoch;
}

/// One thread of the last block.
__device__ inline void end_moe_call(const MoeMeet& m, int kind, std::uint64_t epoch) {
  m.state->last_turn[kind] = m.turn + 1;
  m.state->arrived_blocks = 0;
  end_call(m.meet, epoch);
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
__device__ inline void await_blocks(const MoeMeet& m) {
  const unsigned blocks = num_blocks();
  if (blocks == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(&m.state->arrived_blocks, 1U);
    const std::uint64_t start = now_ns();
    std::uint32_t seen = 0;
    for (;;) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(seen)
                   : "l"(&m.state->arrived_blocks)
                   : "memory");
      if (seen >= blocks) break;
      const std::uint64_t waited = now_ns() - start;
      if (is_over(m.meet.sink, waited)) {
        report_and_trap(m.meet.sink, m.meet.kind, m.meet.rank, m.meet.rank, blocks, seen, waited);
      }
    }
  }
  __syncthreads();
}

/// For other kernels of this device. What was written before is seen with it only behind a fence.
__device__ inline void store_relaxed(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

/// Lets the kernel behind this one on the stream take its place on the device, if it was launched
/// to do so, and tells it the epoch of the call. All threads: the first that says so speaks for its
/// block.
__device__ inline void let_next_begin(MoeState* state, std::uint64_t epoch) {
  if (block_idx() == 0 && threadIdx.x == 0) {
    store_relaxed(&state->begun, epoch);
    __threadfence();
  }
  __syncthreads();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernel before this one on the stream has ended, where this one was launched
/// early.
__device__ inline void await_earlier_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Waits for a slot that counts in steps below an epoch; reports speak of epochs.
/// @return what it came to
__device__ inline std::uint64_t await_step(const MeetParams& p, const std::uint64_t* slot,
                                           std::uint64_t wanted, int epoch_shift,
                                           std::int32_t peer) {
  const std::uint64_t start = now_ns();
  for (;;) {
    const std::uint64_t seen = load_acquire(slot);
    if (seen >= wanted) return seen;
    const std::uint64_t waited = now_ns() - start;
    if (is_over(p.sink, waited)) {
      report_and_trap(p.sink, p.kind, p.rank, peer, wanted >> epoch_shift, seen >> epoch_shift,
                      waited);
    }
  }
}

}  // namespace waybill::cuda
