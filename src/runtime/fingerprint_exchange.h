#pragma once

#include <cstdint>
#include <string_view>

#include "runtime/fingerprint.h"
#include "transport/transport.h"

namespace waybill::detail {

/// One collective call, as ranks compare it.
struct ComparedCall {
  std::string_view operation;  ///< in errors
  std::uint64_t epoch = 0;
  CallFingerprint fingerprint;
};

/// What the ranks of a call in host memory tell each other about it: each sends its words first,
/// and compares before it believes what others brought. For calls of dispatchers and of layers.
class FingerprintExchange {
 public:
  /// @param pad with_fingerprints(num_signals, W) counters: the words lie behind the signals
  FingerprintExchange(Transport& transport, const SignalPad& pad, std::int64_t num_signals,
                      const ComparedCall& call);

  /// To all other ranks, before whatever else they are told.
  void send() const;

  /// With a rank that has come to this call. @throws Disagreement
  void compare(Rank peer) const;

  /// With all ranks that have sent their words of this call so far, beginning with `first`.
  /// @throws Disagreement
  void compare_all(Rank first) const;

 private:
  /// @return whether the peer has sent its words of this call. @throws Disagreement
  bool compare_if_sent(Rank peer) const;
  [[nodiscard]] std::int64_t slot_of(Rank rank) const;

  Transport& transport_;
  const SignalPad& pad_;
  std::int64_t num_signals_;
  ComparedCall call_;
  FingerprintWords mine_;
};

}  // namespace waybill::detail
