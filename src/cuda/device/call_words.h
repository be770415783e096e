#pragma once

#include <cstdint>

#include "fault.h"
#include "runtime/fingerprint.h"

namespace waybill::cuda {

static_assert(fault_words == fingerprint_words);

/// What this rank says of its call (CallFingerprint, packed), and where ranks keep what they are
/// sent: slots [2][W] of fault_words, by parity of the epoch and rank, in the pad of the arrivals.
struct FingerprintParams {
  std::uint64_t words[fault_words];  ///< without tags
  /// Words 1 and 2, in device memory: a plan that is replaced takes them along. Null: as above.
  const std::uint64_t* plan;
  std::int32_t first_slot;  ///< words from a rank's arrivals to the slots
  /// Whether ranks of other nodes send theirs, too: the network path takes them along.
  bool crosses_nodes;
};

}  // namespace waybill::cuda
