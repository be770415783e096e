#pragma once

#include "call_words.h"
#include "signal.cuh"

namespace waybill::cuda {

struct CallWords {
  std::uint64_t word[fault_words];
};

/// What this rank says of its call. To be asked for well before it is needed, as the plan's part
/// comes from memory.
__device__ inline CallWords load_call_words(const FingerprintParams& f) {
  CallWords words{{f.words[0], f.words[1], f.words[2], f.words[3]}};
  if (f.plan != nullptr) {
    words.word[1] = f.plan[0];
    words.word[2] = f.plan[1];
  }
  return words;
}

/// Where rank r's words of a call stand behind the arrivals of one rank.
__device__ inline std::uint64_t* words_at(std::uint64_t* arrivals, const FingerprintParams& f,
                                          std::int32_t world_size, std::uint64_t epoch,
                                          std::int32_t r) {
  const std::int32_t slot = static_cast<std::int32_t>(epoch % 2) * world_size + r;
  return arrivals + f.first_slot + slot * fault_words;
}

__device__ inline std::uint64_t tagged(std::uint64_t word, std::uint64_t epoch) {
  return word | (epoch & fingerprint_tag_mask);
}

/// Each word says of which call it is: no order is needed.
__device__ inline void store_words(std::uint64_t* at, const CallWords& words, std::uint64_t epoch) {
#pragma unroll
  for (int w = 0; w < fault_words; w += 2) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at + w),
                 "l"(tagged(words.word[w], epoch)), "l"(tagged(words.word[w + 1], epoch))
                 : "memory");
  }
}

/// With their tags.
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

/// Bits in which words that have come differ from this rank's: 0 when both mean the same call.
__device__ inline std::uint64_t difference(const CallWords& mine, const CallWords& theirs,
                                           std::uint64_t epoch) {
  std::uint64_t bits = 0;
#pragma unroll
  for (int w = 0; w < fault_words; ++w) bits |= tagged(mine.word[w], epoch) ^ theirs.word[w];
  return bits;
}

/// Whether all of the words are of this call, and say something else.
__device__ inline bool is_disagreement(std::uint64_t difference) {
  return difference != 0 && (difference & fingerprint_tag_mask) == 0;
}

/// The same of words that may never have come: a rank that sends nothing, such as this one itself,
/// has zeros, which have the tag of every 65536th call.
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

/// For waits that come to a bad end: reports the first rank, from `first` on, whose words mean
/// another call than this. P: ArriveParams or PathParams.
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
