#pragma once

#include "params.h"

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

/// Says whether the host has given up. Many threads ask again and again, so they read its memory
/// only in 16 microseconds of each millisecond.
__device__ inline bool has_given_up(const FaultSink& sink) {
  constexpr std::uint64_t period_mask = (1ULL << 20) - 1;
  constexpr std::uint64_t window_ns = 1ULL << 14;
  return (now_ns() & period_mask) < window_ns && sink.record->given_up != 0;
}

/// is_over() of a long wait. It is a function, as a kernel pays for code that it jumps over.
__device__ __noinline__ inline bool is_long_wait_over(const FaultSink& sink,
                                                      std::uint64_t waited_ns,
                                                      std::uint64_t patience) {
  return waited_ns > patience * sink.timeout_ns || has_given_up(sink);
}

/// Says whether a wait is over: by its deadline (times `patience`), or as the rank has given up.
/// Until look_after_ns it costs a wait one comparison.
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

/// Ends the context after a report, so that no later kernel runs on the device. The thread that
/// writes the record has time to do so. Without a trap this thread ends here, and others of its
/// block when their waits end; their work until then is lost.
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

/// If processes share a device, a thread that gives up leaves its kernel and others go on, with
/// rows that are not there. So a thread asks before it uses rows of others: a warp that has lost a
/// lane would wait for that lane's loads for ever.
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

/// Reports that a graph was replayed with another parity than that of the epoch.
[[noreturn]] __device__ __noinline__ inline void report_parity(const FaultSink& sink,
                                                               FaultKind call, std::int32_t rank,
                                                               std::uint32_t wanted,
                                                               std::uint64_t epoch) {
  report(sink, FaultKind::parity, rank, rank, wanted, epoch, 0, call);
  end_context(sink);
}

inline constexpr unsigned polls_a_look = 64;

/// Polls until `poll()` is true. Every 64th time it calls `look_up(waited_ns)`, which reports if
/// the wait has failed: a short wait reads no clock. The time counts from the first call, tens of
/// microseconds after the start. look_up() should call functions that are not inlined.
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

/// Waits until the flag is at least `wanted`: the peer's earlier writes are then visible.
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

struct CallWords {
  std::uint64_t word[fault_words];
};

/// Loads the words of this rank's call. Call it well before they are needed, as the plan's part
/// comes from memory.
__device__ inline CallWords load_call_words(const FingerprintParams& f) {
  CallWords words{{f.words[0], f.words[1], f.words[2], f.words[3]}};
  if (f.plan != nullptr) {
    words.word[1] = f.plan[0];
    words.word[2] = f.plan[1];
  }
  return words;
}

/// Returns the address of rank r's words of a call, after the arrivals of one rank.
__device__ inline std::uint64_t* words_at(std::uint64_t* arrivals, const FingerprintParams& f,
                                          std::int32_t world_size, std::uint64_t epoch,
                                          std::int32_t r) {
  const std::int32_t slot = static_cast<std::int32_t>(epoch % 2) * world_size + r;
  return arrivals + f.first_slot + slot * fault_words;
}

__device__ inline std::uint64_t tagged(std::uint64_t word, std::uint64_t epoch) {
  return word | (epoch & fingerprint_tag_mask);
}

/// Each word has the tag of its call, so the order does not matter.
__device__ inline void store_words(std::uint64_t* at, const CallWords& words, std::uint64_t epoch) {
#pragma unroll
  for (int w = 0; w < fault_words; w += 2) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at + w),
                 "l"(tagged(words.word[w], epoch)), "l"(tagged(words.word[w + 1], epoch))
                 : "memory");
  }
}

/// Loads words with their tags.
__device__ inline CallWords load_words(const std::uint64_t* at) {
  CallWords words;
#pragma unroll
  for (int w = 0; w < fault_words; w += 2) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words.word[w]), "=l"(words.word[w + 1])
                 : "l"(at + w)
                 : "memory");
  }
  return words;
}

/// Returns the bits in which received words differ from this rank's: 0 for the same call.
__device__ inline std::uint64_t difference(const CallWords& mine, const CallWords& theirs,
                                           std::uint64_t epoch) {
  std::uint64_t bits = 0;
#pragma unroll
  for (int w = 0; w < fault_words; ++w) bits |= tagged(mine.word[w], epoch) ^ theirs.word[w];
  return bits;
}

/// Says whether all words belong to this call, and differ.
__device__ inline bool is_disagreement(std::uint64_t difference) {
  return difference != 0 && (difference & fingerprint_tag_mask) == 0;
}

/// Says the same of words that may never have come: the slot of a rank that sends nothing has
/// zeros, which have the tag of every 65536th call.
__device__ inline bool means_otherwise(const CallWords& mine, const CallWords& theirs,
                                       std::uint64_t epoch) {
  const bool has_sent = theirs.word[0] >> fingerprint_tag_bits != 0;
  return has_sent && is_disagreement(difference(mine, theirs, epoch));
}

__device__ inline void report_disagreement(const FaultSink& sink, FaultKind call, std::int32_t rank,
                                           const CallWords& mine, std::int32_t peer,
                                           const CallWords& theirs, std::uint64_t epoch,
                                           std::uint64_t waited_ns) {
  if (atomicCAS(sink.claimed, 0ULL, 1ULL) != 0ULL) return;
  for (int w = 0; w < fault_words; ++w) {
    sink.record->mine[w] = mine.word[w];
    sink.record->theirs[w] = theirs.word[w];
  }
  write_record(sink, FaultKind::disagreement, rank, peer, epoch, epoch, waited_ns, call);
}

/// For waits that failed: reports the first rank, from `first` on, whose words belong to another
/// call. P: ArriveParams or PathParams.
template <class P>
__device__ inline void report_disagreement(const P& p, std::uint64_t* arrivals, std::uint64_t epoch,
                                           std::int32_t first, std::uint64_t waited_ns) {
  const CallWords mine = load_call_words(p.fingerprint);
  for (std::int32_t k = 0; k < p.world_size; ++k) {
    const std::int32_t other = (first + k) % p.world_size;
    const CallWords theirs =
        load_words(words_at(arrivals, p.fingerprint, p.world_size, epoch, other));
    if (other == p.rank || !means_otherwise(mine, theirs, epoch)) continue;
    report_disagreement(p.sink, p.kind, p.rank, mine, other, theirs, epoch, waited_ns);
    return;
  }
}

}  // namespace waybill::cuda
