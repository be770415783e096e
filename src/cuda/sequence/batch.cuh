#pragma once

#include "../device/arrive_and_wait.cuh"
#include "../device/bulk.cuh"
#include "../device/peers.cuh"
#include "kernels.h"

namespace waybill::cuda {

__device__ inline std::int32_t rank_of(std::uint64_t address) {
  return static_cast<std::int32_t>(address >> address_rank_shift);
}

/// The byte of a rank's window that an address of a plan names.
__device__ inline std::byte* place_of(const SequenceParams& p, std::uint64_t address) {
  return peer_at(p.windows, rank_of(address)) + (address & address_offset_mask);
}

/// The place of an addend, which may be a sum.
__device__ inline const std::byte* addend_at(const SequenceParams& p, std::uint64_t address) {
  return place_of(p, address & ~address_sum_bit);
}

/// Whether all waits of a batch are over. A warp; its lanes then see what the ranks wrote.
__device__ inline bool is_ready(const SequenceParams& p, const WorkBatch& batch,
                                std::uint64_t epoch) {
  bool ready = true;
  for (int w = static_cast<int>(threadIdx.x % 32); w < batch.num_waits; w += 32) {
    const BatchSlot slot = p.waits[batch.first_wait + w];
    ready = ready && load_acquire(p.own_slots + p.arrive.world_size + slot.slot) >= epoch;
  }
  if (__all_sync(0xFFFFFFFFU, ready) == 0) return false;
  __syncwarp();
  fence_async_global();
  return true;
}

/// The same, until it is so.
__device__ inline void wait_batch(const SequenceParams& p, const WorkBatch& batch,
                                  std::uint64_t epoch) {
  for (int w = static_cast<int>(threadIdx.x % 32); w < batch.num_waits; w += 32) {
    const BatchSlot slot = p.waits[batch.first_wait + w];
    const std::uint64_t* const flag = p.own_slots + p.arrive.world_size + slot.slot;
    std::uint64_t seen = 0;
    spin_until([&] { return (seen = load_acquire(flag)) >= epoch; },
               [&](std::uint64_t waited_ns) {
                 if (is_over(p.arrive.sink, waited_ns)) {
                   report_missed(p.arrive, epoch, slot.rank, seen, waited_ns);
                 }
               });
  }
  __syncwarp();
  end_if_reported(p.arrive.sink);
  fence_async_global();
}

/// One lane: `chunks` more of a batch are where they belong, all their writes complete. The last
/// one raises the signals.
__device__ inline void count_chunks(const SequenceParams& p, std::int32_t number, unsigned chunks,
                                    std::uint64_t epoch) {
  const WorkBatch& batch = p.batches[number];
  __threadfence_system();
  unsigned* const done = p.done + number;
  if (atomicAdd(done, chunks) + chunks != static_cast<unsigned>(batch.num_chunks)) return;
  __threadfence();  // all that count are on this device
  *done = 0;        // for the next call
  for (int s = 0; s < batch.num_signals; ++s) {
    const BatchSlot slot = p.signals[batch.first_signal + s];
    std::uint64_t* const flag = slot.rank == p.arrive.world_size
                                    ? p.ready + slot.slot
                                    : peer_at(p.slots, slot.rank) + p.arrive.world_size + slot.slot;
    signal(flag, epoch);
  }
}

/// Counts one lane's chunks when they have arrived.
class ArrivalCount {
 public:
  __device__ ArrivalCount(const SequenceParams& p, std::uint64_t epoch) : p_(p), epoch_(epoch) {}

  /// A chunk of a batch has arrived.
  __device__ void add(std::int32_t batch) {
    if (batch != batch_) flush();
    batch_ = batch;
    ++chunks_;
  }
  /// To be called before anything that may wait, and at the end.
  __device__ void flush() {
    if (chunks_ > 0 && p_.batches[batch_].num_signals > 0) {
      count_chunks(p_, batch_, chunks_, epoch_);
    }
    chunks_ = 0;
  }

 private:
  const SequenceParams& p_;
  const std::uint64_t epoch_;
  std::int32_t batch_ = -1;
  unsigned chunks_ = 0;
};

}  // namespace waybill::cuda
