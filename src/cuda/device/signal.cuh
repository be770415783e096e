#pragma once

#include <cstdint>

#include "fault.h"

namespace waybill::cuda {

__device__ inline std::uint64_t now_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// Publishes this thread's earlier writes, and those that it has seen. Pairs with load_acquire().
__device__ inline void signal(std::uint64_t* flag, std::uint64_t epoch) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
}

/// signal() in two steps, for stores that need no order and go out between them.
__device__ inline void fence_release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline void store_behind_fence(std::uint64_t* flag, std::uint64_t epoch) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
}

__device__ inline std::uint64_t load_acquire(const std::uint64_t* flag) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

/// Whether the host has given up. Many threads may ask, each again and again: they read its memory
/// in 16 microseconds of each millisecond.
__device__ inline bool has_given_up(const FaultSink& sink) {
  constexpr std::uint64_t period_mask = (1ULL << 20) - 1;
  constexpr std::uint64_t window_ns = 1ULL << 14;
  return (now_ns() & period_mask) < window_ns && sink.record->given_up != 0;
}

/// is_over() of a long wait. A function of its own: a kernel pays for code that it jumps over.
__device__ __noinline__ inline bool is_long_wait_over(const FaultSink& sink,
                                                      std::uint64_t waited_ns,
                                                      std::uint64_t patience) {
  return waited_ns > patience * sink.timeout_ns || has_given_up(sink);
}

/// Whether a wait has come to its end: by its deadline (times `patience`), or as the rank has given
/// up. Until look_after_ns it costs a wait one comparison.
__device__ inline bool is_over(const FaultSink& sink, std::uint64_t waited_ns,
                               std::uint64_t patience = 1) {
  return waited_ns > sink.look_after_ns && is_long_wait_over(sink, waited_ns, patience);
}

/// `call`: for kinds that are not a call's.
__device__ inline void write_record(const FaultSink& sink, FaultKind kind, std::int32_t rank,
                                    std::int32_t peer, std::uint64_t wanted, std::uint64_t seen,
                                    std::uint64_t waited_ns, FaultKind call) {
  sink.record->call = call;
  sink.record->rank = rank;
  sink.record->peer = peer;
  sink.record->wanted = wanted;
  sink.record->seen = seen;
  sink.record->waited_ns = waited_ns;
  __threadfence_system();
  sink.record->kind = kind;
  __threadfence_system();
}

/// The first thread of a rank writes the record.
__device__ inline void report(const FaultSink& sink, FaultKind kind, std::int32_t rank,
                              std::int32_t peer, std::uint64_t wanted, std::uint64_t seen,
                              std::uint64_t waited_ns, FaultKind call = FaultKind::none) {
  if (atomicCAS(sink.claimed, 0ULL, 1ULL) != 0ULL) return;
  write_record(sink, kind, rank, peer, wanted, seen, waited_ns, call);
}

/// Behind a report: ends the context, so that nothing behind this kernel on the device runs any
/// more. The thread that writes the record is given the time to do so. Without a trap the thread
/// ends here, others of its block when their waits do; what they do until then is of no use.
[[noreturn]] __device__ __noinline__ inline void end_context(const FaultSink& sink) {
  constexpr std::uint64_t time_to_write_ns = 5'000'000;
  if (!sink.traps) {
    asm volatile("exit;");
    __builtin_unreachable();
  }
  const std::uint64_t start = now_ns();
  while (now_ns() - start < sink.grace_ns + time_to_write_ns) __nanosleep(100'000);
  __trap();
  __builtin_unreachable();
}

/// Where processes share a device, who gives up leaves its kernel, and others go on: with what is
/// not there. So whoever uses what others were to bring asks first: a warp that has lost a lane
/// would wait for that lane's loads for ever.
__device__ __noinline__ inline void end_if_claimed(const FaultSink& sink) {
  if (*static_cast<volatile unsigned long long*>(sink.claimed) != 0) end_context(sink);
}
__device__ inline void end_if_reported(const FaultSink& sink) {
  if (!sink.traps) end_if_claimed(sink);
}

[[noreturn]] __device__ __noinline__ inline void report_and_trap(
    const FaultSink& sink, FaultKind kind, std::int32_t rank, std::int32_t peer,
    std::uint64_t wanted, std::uint64_t seen, std::uint64_t waited_ns) {
  report(sink, kind, rank, peer, wanted, seen, waited_ns);
  end_context(sink);
}

/// A graph was replayed for the other parity than that of the epoch.
[[noreturn]] __device__ __noinline__ inline void report_parity(const FaultSink& sink,
                                                               FaultKind call, std::int32_t rank,
                                                               std::uint32_t wanted,
                                                               std::uint64_t epoch) {
  report(sink, FaultKind::parity, rank, rank, wanted, epoch, 0, call);
  end_context(sink);
}

inline constexpr unsigned polls_a_look = 64;

/// Polls until `poll()` is true. Every 64th time it asks `look_up(waited_ns)`, which reports if the
/// wait has come to a bad end: a wait that goes well reads no clock, and what it asks then should
/// be a function of its own. The time is that since the first look, tens of microseconds after the
/// begin.
template <class Poll, class LookUp>
__device__ inline void spin_until(Poll&& poll, LookUp&& look_up) {
  std::uint64_t start = 0;
  for (unsigned polls = 1; !poll(); ++polls) {
    if (polls % polls_a_look != 0) continue;
    const std::uint64_t now = now_ns();
    if (start == 0) start = now;
    look_up(now - start);
  }
}

/// Waits until the flag is at least `wanted`: what the peer signalled before is then visible.
__device__ inline void wait_until(const std::uint64_t* flag, std::uint64_t wanted, FaultKind kind,
                                  std::int32_t rank, std::int32_t peer, const FaultSink& sink) {
  std::uint64_t seen = 0;
  spin_until([&] { return (seen = load_acquire(flag)) >= wanted; },
             [&](std::uint64_t waited_ns) {
               if (is_over(sink, waited_ns)) {
                 report_and_trap(sink, kind, rank, peer, wanted, seen, waited_ns);
               }
             });
}

}  // namespace waybill::cuda
