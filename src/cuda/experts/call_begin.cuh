#pragma once

#include "call.cuh"

namespace waybill::cuda {

/// The kernel ahead on the stream, with which the call began. With receive slots it says what
/// senders and receivers need of it before it ends, in words that are waited for: that it has given
/// its place away says nothing of what it has written (docs/decisions/begin_words.md). A thread
/// each.
class CallBegin {
 public:
  template <class Rows>
  __device__ explicit CallBegin(const Rows& p)
      : state_(p.m.state),
        arrive_(p.m.arrive),
        has_begin_words_(Rows::lands && p.receive_slots.is_all) {}

  /// Waits until it has ended. @return the epoch of the call
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

  /// The epoch of the call. Where it is told, waits for the word alone: the last dispatch has left
  /// 0 there.
  __device__ std::uint64_t epoch() {
    if (!has_begin_words_) return wait_ended();
    if (epoch_ == 0) epoch_ = wait_begin(arrive_, &state_->begun, 1);
    return epoch_;
  }

  /// Where it is told: waits until the tokens of source r are placed.
  __device__ void wait_placed(std::int32_t r) {
    if (has_begin_words_) (void)wait_begin(arrive_, placed_slot(state_, r), epoch());
  }

 private:
  static __device__ std::uint64_t wait_begin(const ArriveParams& arrive, const std::uint64_t* at,
                                             std::uint64_t least) {
    std::uint64_t seen = 0;
    spin_until(
        [&] {
          asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
          return seen >= least;
        },
        [&](std::uint64_t waited_ns) { look_up(arrive, least, seen, waited_ns); });
    return seen;
  }

  /// The kernel ahead has a deadline of its own, and knows who is late.
  static __device__ __noinline__ void look_up(const ArriveParams& arrive, std::uint64_t least,
                                              std::uint64_t seen, std::uint64_t waited_ns) {
    if (is_over(arrive.sink, waited_ns, 2)) {
      report_and_trap(arrive.sink, arrive.kind, arrive.rank, arrive.rank, least, seen, waited_ns);
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
