#pragma once

#include "meet.cuh"

namespace waybill::cuda {

/// The kernel ahead on the stream, with which the call began. Where few tokens land it tells what
/// senders and receivers need of it before it ends. A thread each.
class CallBegin {
 public:
  __device__ explicit CallBegin(const RowsParams& p)
      : state_(p.m.state), is_told_(p.ahead == Ahead::lands && p.landing.is_all) {}

  /// Waits until it has ended. @return the epoch of the call
  __device__ std::uint64_t await() {
    if (epoch_ == 0) {
      await_earlier_kernel();
      epoch_ = __ldcg(&state_->call.epoch);
    }
    return epoch_;
  }

  /// The epoch of the call; does not wait where it is told.
  __device__ std::uint64_t epoch() { return is_told_ ? load(&state_->begun) : await(); }

  /// Where it is told: waits until the tokens of source r are placed.
  __device__ void await_placed(const MeetParams& p, std::int32_t r) {
    if (!is_told_) return;
    const std::uint64_t wanted = epoch();
    const std::uint64_t start = now_ns();
    for (;;) {
      const std::uint64_t seen = load(state_->placed + r);
      if (seen >= wanted) return;
      const std::uint64_t waited = now_ns() - start;
      // The kernel ahead has a deadline of its own, and knows who is late.
      if (is_over(p.sink, waited, 2)) {
        report_and_trap(p.sink, p.kind, p.rank, p.rank, wanted, seen, waited);
      }
    }
  }

 private:
  static __device__ std::uint64_t load(const std::uint64_t* at) {
    std::uint64_t value = 0;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
  }

  const MoeState* const state_;
  const bool is_told_;
  std::uint64_t epoch_ = 0;
};

}  // namespace waybill::cuda
