#pragma once

#include <cstdint>

#include "../device/arrive_and_wait.cuh"
#include "../device/signal.cuh"
#include "kernels.h"

namespace waybill::cuda {

// The lanes of a warp.

inline constexpr unsigned all_lanes = 0xFFFFFFFFU;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % 32); }

/// Whether this lane is the lowest one of a set.
__device__ inline bool is_first(unsigned lanes) {
  return lane_id() == __ffs(static_cast<int>(lanes)) - 1;
}

/// The lanes that hold topk slots of the same token as this lane. Lanes hold topk slots in order.
/// @param k this lane's topk slot of the token
__device__ inline unsigned lanes_of_token(std::int32_t topk, std::int32_t k) {
  const unsigned of_first = topk == 32 ? all_lanes : (1U << topk) - 1;
  return of_first << (lane_id() - k);
}

/// Bits that the numbers 0..max_value take.
__device__ inline int bits_of(std::int32_t max_value) { return 32 - __clz(max_value); }

/// The lanes whose values are equal to this lane's in the lowest `bits` bits. It takes one ballot
/// per bit; __match_any_sync takes one step per distinct value, which is ten times slower when they
/// all differ.
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

// Callers give ids, positions and weights in one of two widths.

__device__ inline std::int64_t index_at(const void* indices, bool wide, std::int64_t i) {
  return wide ? static_cast<const std::int64_t*>(indices)[i]
              : static_cast<const std::int32_t*>(indices)[i];
}

/// The id that this rank sends for its topk slot i: the expert, num_experts if the slot was
/// dropped, -1 if there is no such token.
/// @param bad becomes true if the id is neither an expert nor the dropped id
__device__ inline std::int32_t id_to_send(const MoeShape& s, const void* ids, bool wide,
                                          std::int32_t dropped_id, std::int64_t i, bool& bad) {
  if (i >= std::int64_t{s.num_tokens} * s.topk) return -1;
  const std::int64_t id = index_at(ids, wide, i);
  const bool in_range = 0 <= id && id < s.num_experts;
  bad |= !in_range && id != dropped_id;
  return in_range ? static_cast<std::int32_t>(id) : s.num_experts;
}

/// The bits of a weight of 4 or 2 bytes. Another rank may have stored it while this kernel ran.
__device__ inline std::uint32_t load_weight(const std::byte* weights, std::int64_t i, int bytes) {
  return bytes == 4 ? __ldcg(reinterpret_cast<const std::uint32_t*>(weights) + i)
                    : __ldcg(reinterpret_cast<const std::uint16_t*>(weights) + i);
}

__device__ inline void store_weight(std::byte* weights, std::int64_t i, int bytes,
                                    std::uint32_t bits) {
  if (bytes == 4) {
    reinterpret_cast<std::uint32_t*>(weights)[i] = bits;
  } else {
    reinterpret_cast<std::uint16_t*>(weights)[i] = static_cast<std::uint16_t>(bits);
  }
}

__device__ inline void copy_weight(std::byte* to, const std::byte* from, std::int64_t to_idx,
                                   std::int64_t from_idx, int bytes) {
  store_weight(to, to_idx, bytes, load_weight(from, from_idx, bytes));
}

// Some mistakes in the caller's tensors can be seen by the device only. The call that finds one
// reports it and ends the context, so that nobody takes wrong data for a result. These functions
// are not inlined and have few arguments, because the kernels have no registers to spare.

/// Values that a report carries, by kind; see describe_input() in gpu_rank.cpp.
struct InputValues {
  std::int64_t of[2 * fault_words];
};

[[noreturn]] __device__ inline void report_input(const FaultSink& sink, FaultKind kind,
                                                 FaultKind call, std::int32_t rank,
                                                 std::uint64_t epoch, const InputValues& values) {
  if (atomicCAS(sink.claimed, 0ULL, 1ULL) == 0ULL) {
    for (int w = 0; w < fault_words; ++w) {
      sink.record->mine[w] = static_cast<std::uint64_t>(values.of[w]);
      sink.record->theirs[w] = static_cast<std::uint64_t>(values.of[fault_words + w]);
    }
    write_record(sink, kind, rank, rank, epoch, epoch, 0, call);
  }
  end_context(sink);
}

/// This rank's ids, for kernels without RouteParams.
struct BadIds {
  const MoeShape& shape;
  const void* ids;
  bool wide_ids;
  std::int32_t dropped_id;
};

/// Finds this rank's first bad id, which must exist, and reports it. P is RouteParams or BadIds.
template <class P>
[[noreturn]] __device__ __noinline__ void report_bad_id(const P& p, const FaultSink& sink,
                                                        const MoeState* state) {
  const MoeShape& s = p.shape;
  std::int64_t i = 0;
  std::int64_t id = 0;
  for (; i < std::int64_t{s.num_tokens} * s.topk; ++i) {
    id = index_at(p.ids, p.wide_ids, i);
    if ((id < 0 || id >= s.num_experts) && id != p.dropped_id) break;
  }
  report_input(sink, FaultKind::expert_id, FaultKind::moe_dispatch, s.rank, state->call.epoch + 1,
               {{id, i / s.topk, i % s.topk, s.num_experts, p.dropped_id}});
}

/// Reports that this rank has more topk slots of an expert than it may have.
[[noreturn]] __device__ __noinline__ inline void report_many_of_expert(const RouteParams& p,
                                                                       std::int32_t expert) {
  report_input(p.m.arrive.sink, FaultKind::expert_times, FaultKind::moe_dispatch, p.shape.rank,
               p.m.state->call.epoch + 1, {{expert, p.max_per_expert}});
}

/// Reports that full_scatter_indices do not cover the tokens of all ranks exactly.
[[noreturn]] __device__ __noinline__ inline void report_scatter_size(const RouteParams& p,
                                                                     std::int32_t tokens) {
  report_input(p.m.arrive.sink, FaultKind::scatter_size, FaultKind::moe_dispatch, p.shape.rank,
               p.m.state->call.epoch + 1, {{p.scatter_tokens, tokens}});
}

/// Reports a position outside the rows of the rank that has the expert.
[[noreturn]] __device__ __noinline__ inline void report_position(
    const RouteParams& p, std::int64_t position, std::int32_t source, std::int32_t topk_slot,
    std::int32_t first, std::int32_t rows, std::int32_t dst) {
  const std::int32_t topk = p.shape.topk;
  report_input(p.m.arrive.sink, FaultKind::scatter_position, FaultKind::moe_dispatch, p.shape.rank,
               p.m.state->call.epoch + 1,
               {{position, topk_slot / topk, topk_slot % topk, source, first,
                 std::int64_t{first} + rows - 1, dst}});
}

/// Reports a topk slot whose row is already taken by another one.
[[noreturn]] __device__ __noinline__ inline void report_row_twice(const RowsParams& p,
                                                                  std::int32_t row,
                                                                  const RowTag& tag) {
  report_input(p.m.arrive.sink, FaultKind::scatter_twice, FaultKind::moe_dispatch, p.m.arrive.rank,
               p.m.state->call.epoch, {{row, tag.token, tag.topk_slot, tag.source_rank}});
}

/// Reports that a combine got fewer rows than have arrived.
[[noreturn]] __device__ __noinline__ inline void report_few_rows(const FaultSink& sink,
                                                                 const MoeState* state,
                                                                 std::int32_t rank,
                                                                 std::int64_t num_rows,
                                                                 std::int64_t arrived) {
  report_input(sink, FaultKind::combine_rows, FaultKind::moe_combine, rank, state->call.epoch + 1,
               {{num_rows, arrived}});
}

// Delays for tests: kernels wait for a random time at points where the result must not depend on
// which rank or block is faster. Outside tests each point costs one branch on a parameter.

enum class DelayPoint : std::uint32_t {
  rank,    ///< all blocks of a rank, when a call begins
  begun,   ///< before the word that says that a call has begun
  placed,  ///< before the words that say that tokens are placed
  block,   ///< a block that sends, receives or sums rows
};

/// Mixes bits: each result bit depends on all bits of x.
__device__ inline std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352DU;
  x = (x ^ x >> 15) * 0x846CA68BU;
  return x ^ x >> 16;
}

/// Waits for up to `max_delay_ns` in half of the cases, else not at all.
__device__ __noinline__ inline void linger_at(const MoeArrive& m, DelayPoint point,
                                              std::uint64_t what) {
  const auto place =
      static_cast<std::uint32_t>(m.arrive.rank) * 4 + static_cast<std::uint32_t>(point);
  const std::uint32_t drawn = mixed(mixed(place + 1) + static_cast<std::uint32_t>(what));
  if ((drawn & 1U) == 0) return;
  const std::uint64_t ns = std::uint64_t{drawn >> 1U} * m.max_delay_ns >> 31U;
  const std::uint64_t start = now_ns();
  while (now_ns() - start < ns) __nanosleep(200);
}

/// Delays the calling threads.
/// @param what the same number for all threads that wait together
__device__ inline void linger(const MoeArrive& m, DelayPoint point, std::uint64_t what) {
  if (m.max_delay_ns != 0) linger_at(m, point, what);
}

/// Delays each block for a time of its own.
__device__ inline void linger_block(const MoeArrive& m) {
  if (m.max_delay_ns != 0) {
    linger_at(m, DelayPoint::block, (now_ns() >> 14U) * gridDim.x + blockIdx.x);
  }
}

/// Whether the last call of this kind had the parity that the next one has.
__device__ inline bool is_off_parity(const MoeArrive& m, int kind, std::uint32_t next) {
  return m.state->last_parity[kind] == next + 1;
}

/// Begins a call with this kernel. Each block calls it once.
/// @return the epoch of the call
__device__ inline std::uint64_t begin_moe_call(const MoeArrive& m, int kind) {
  end_if_reported(m.arrive.sink);
  const std::uint64_t epoch = m.state->call.epoch + 1;
  const bool is_off = is_off_parity(m, kind, m.parity);  // loaded together with the epoch
  linger(m, DelayPoint::rank, epoch);
  if (is_off) {
    report_parity(m.arrive.sink, m.arrive.kind, m.arrive.rank, m.parity, epoch);
  }
  return epoch;
}

/// Ends a call. One thread of the last block calls it.
__device__ inline void end_moe_call(const MoeArrive& m, int kind, std::uint64_t epoch) {
  m.state->last_parity[kind] = m.parity + 1;
  m.state->arrived_blocks = 0;
  end_call(m.arrive, epoch);
}

__device__ inline unsigned num_blocks() { return gridDim.x * gridDim.y; }
__device__ inline unsigned block_idx() { return blockIdx.y * gridDim.x + blockIdx.x; }

/// True in thread 0 of the block that ends last, when all other blocks have done their work.
__device__ inline bool is_last_block(MoeState* state) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  if (num_blocks() == 1) return true;
  __threadfence();
  return atomicAdd(&state->call.blocks, 1ULL) == num_blocks() - 1;
}

/// Makes all blocks of the kernel wait for each other, once per kernel. After it each block sees
/// what the others had written.
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

/// Stores a word for other kernels on this device. Earlier writes are visible with it only if a
/// fence precedes it.
__device__ inline void store_relaxed(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

/// Stores a word together with everything that this thread has written and seen. Pairs with the
/// loads of CallBegin.
__device__ inline void store_released(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

/// Lets the next kernel on the stream take its place on the device, if it was launched early, and
/// sends it the epoch of the call. The start of that kernel alone proves nothing, because
/// griddepcontrol orders no memory: a kernel that does not wait for this one's end waits for the
/// word. All threads call it, after wait_earlier_kernel(); the first thread that releases the place
/// speaks for its block.
__device__ inline void let_next_begin(const MoeArrive& m, std::uint64_t epoch) {
  const bool is_sender = block_idx() == 0 && threadIdx.x == 0;
  if (is_sender && m.max_delay_ns == 0) store_released(&m.state->begun, epoch);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  if (is_sender && m.max_delay_ns != 0) {
    linger(m, DelayPoint::begun, epoch);
    store_released(&m.state->begun, epoch);
  }
}

/// Waits until the previous kernel on the stream has ended, if this one was launched early.
__device__ inline void wait_earlier_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Whether a rank has announced a different call.
__device__ inline bool means_another_call(const ArriveParams& p, std::uint64_t epoch,
                                          std::int32_t peer) {
  return means_otherwise(load_call_words(p.fingerprint), load_words(call_words_at(p, epoch, peer)),
                         epoch);
}

/// Runs now and then while a kernel waits for a peer. It reports if the peer has announced a
/// different call, as what is waited for may then never come, or if the deadline has passed.
__device__ __noinline__ inline void check_while_waiting(const ArriveParams& p, std::uint64_t epoch,
                                                        std::int32_t peer, std::uint64_t seen,
                                                        std::uint64_t waited_ns) {
  if (means_another_call(p, epoch, peer) || is_over(p.sink, waited_ns)) {
    report_missed(p, epoch, peer, seen, waited_ns);
  }
}

/// Waits for a slot that counts smaller steps within an epoch. Reports speak of epochs.
/// @return the value that the slot has reached
__device__ inline std::uint64_t wait_epoch(const ArriveParams& p, const std::uint64_t* slot,
                                           std::uint64_t wanted, int epoch_shift,
                                           std::int32_t peer) {
  std::uint64_t seen = 0;
  spin_until([&] { return (seen = load_acquire(slot)) >= wanted; },
             [&](std::uint64_t waited_ns) {
               check_while_waiting(p, wanted >> epoch_shift, peer, seen >> epoch_shift, waited_ns);
             });
  return seen;
}

/// Waits for a slot that counts epochs.
__device__ inline void wait_slot(const ArriveParams& p, const std::uint64_t* slot,
                                 std::uint64_t epoch, std::int32_t peer) {
  (void)wait_epoch(p, slot, epoch, 0, peer);
}

/// Waits until all other ranks have come to `epoch`. CallComparison checks what they mean by the
/// call. One warp; all its lanes see what the ranks wrote before.
__device__ inline void wait_arrivals(const ArriveParams& p, std::uint64_t epoch) {
#pragma unroll 1
  for (std::int32_t k = 1 + static_cast<std::int32_t>(threadIdx.x % 32); k < p.world_size;
       k += 32) {
    const std::int32_t peer = rank_after(p, k);
    wait_slot(p, p.own_arrivals + peer, epoch, peer);
  }
  __syncwarp();
}

/// Whether this is the warp that sends and compares call words. It is one with little other work.
__device__ inline bool compares_calls() {
  return block_idx() == 0 && threadIdx.x / 32 == blockDim.x / 32 - 1;
}

/// Announces this call and waits until all ranks have come to it. The call words go out after the
/// arrival, so that nobody waits for them; CallComparison checks them. All threads.
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

/// Checks that the ranks of the node mean the same call. The words are loaded early and checked
/// late, so that nobody waits for them. One warp; each lane checks some ranks.
class CallComparison {
 public:
  /// Loads the words, if this warp compares. They may not have arrived yet; settle() then loads
  /// them again.
  __device__ CallComparison(const ArriveParams& p, std::uint64_t epoch, bool compares)
      : epoch_(epoch), theirs_{} {
    const std::int32_t first = 1 + static_cast<std::int32_t>(threadIdx.x % 32);
    if (compares && first < p.world_size) {
      theirs_ = load_words(call_words_at(p, epoch, rank_after(p, first)));
    }
  }

  /// Ends the kernel if a rank means a different call.
  __device__ void settle(const ArriveParams& p) {
    const CallWords mine = load_call_words(p.fingerprint);
    const std::int32_t first = 1 + static_cast<std::int32_t>(threadIdx.x % 32);
#pragma unroll 1
    for (std::int32_t k = first; k < p.world_size; k += 32) {
      const std::int32_t peer = rank_after(p, k);
      if (!sends_call_words(p, peer)) continue;
      if (k != first) theirs_ = load_words(call_words_at(p, epoch_, peer));
      std::uint64_t differs = difference(mine, theirs_, epoch_);
      const auto is_known = [&] { return differs == 0 || is_disagreement(differs); };
      if (!is_known()) {
        spin_until(
            [&] {
              theirs_ = load_words(call_words_at(p, epoch_, peer));
              differs = difference(mine, theirs_, epoch_);
              return is_known();
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

/// The previous kernel on the stream, with which the call began. With receive slots it announces
/// its results in words, before it ends. A kernel must wait for these words: that the previous
/// kernel has released its place says nothing about what it has written
/// (docs/decisions/experts.md). Each thread has its own.
class CallBegin {
 public:
  template <class Rows>
  __device__ explicit CallBegin(const Rows& p)
      : state_(p.m.state),
        arrive_(p.m.arrive),
        has_begin_words_(Rows::to_slots && p.receive_slots.is_all) {}

  /// Waits until the kernel has ended.
  /// @return the epoch of the call
  __device__ std::uint64_t wait_ended() {
    if (!has_ended_) {
      wait_earlier_kernel();
      end_if_reported(arrive_.sink);
      has_ended_ = true;
      epoch_ = __ldcg(&state_->call.epoch);
    }
    return epoch_;
  }

  [[nodiscard]] __device__ bool has_begin_words() const { return has_begin_words_; }

  /// The epoch of the call. With words it waits for the word alone, which the last dispatch has
  /// left at 0.
  __device__ std::uint64_t epoch() {
    if (!has_begin_words_) return wait_ended();
    if (epoch_ == 0) epoch_ = wait_begin(arrive_, &state_->begun, 1);
    return epoch_;
  }

  /// With words it waits until the tokens of source r are placed.
  __device__ void wait_placed(std::int32_t r) {
    if (has_begin_words_) (void)wait_begin(arrive_, placed_slot(state_, r), epoch());
  }

 private:
  static __device__ std::uint64_t wait_begin(const ArriveParams& arrive, const std::uint64_t* at,
                                             std::uint64_t wanted) {
    std::uint64_t seen = 0;
    spin_until(
        [&] {
          asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
          return seen >= wanted;
        },
        [&](std::uint64_t waited_ns) { check_while_waiting(arrive, wanted, seen, waited_ns); });
    return seen;
  }

  /// Waits twice as long as the previous kernel, which has a deadline of its own and knows which
  /// rank is late.
  static __device__ __noinline__ void check_while_waiting(const ArriveParams& arrive,
                                                          std::uint64_t wanted, std::uint64_t seen,
                                                          std::uint64_t waited_ns) {
    if (is_over(arrive.sink, waited_ns, 2)) {
      report_and_trap(arrive.sink, arrive.kind, arrive.rank, arrive.rank, wanted, seen, waited_ns);
    }
    end_if_reported(arrive.sink);
  }

  MoeState* const state_;
  const ArriveParams& arrive_;
  const bool has_begin_words_;
  bool has_ended_ = false;
  std::uint64_t epoch_ = 0;
};

}  // namespace waybill::cuda
