#pragma once

#include <cstdint>

#include "waybill/runtime/executor.h"
#include "waybill/runtime/fingerprint.h"
#include "waybill/transport/transport.h"

namespace waybill::detail {

/// What the ranks of a call in host memory tell each other about it, behind the arrivals: each
/// tells first, and compares before it believes what others brought.
class FingerprintExchange {
 public:
  FingerprintExchange(Transport& transport, const SequenceCall& call);

  /// Tells all other ranks, before whatever else they are told.
  void send() const;

  /// With a rank that has come to this call. @throws Disagreement
  void compare(Rank peer) const;

  /// With all ranks that have told of this call so far, beginning with `first`.
  /// @throws Disagreement
  void compare_all(Rank first) const;

 private:
  /// @return whether the peer has told of this call. @throws Disagreement
  bool compare_if_sent(Rank peer) const;
  [[nodiscard]] std::int64_t slot_of(Rank rank) const;

  Transport& transport_;
  const SequenceCall& call_;
  FingerprintWords mine_;
};

}  // namespace waybill::detail
