#pragma once

#include <cstdint>
#include <string_view>

#include "runtime/executor.h"
#include "runtime/fingerprint_exchange.h"
#include "transport/transport.h"

namespace waybill::detail {

/// Waits of a call in host memory, with the transport's deadline. A rank that has waited for half
/// of it tells all others for whom, so that who waits for a rank that only waits itself names the
/// one that is silent.
class StallDetector {
 public:
  StallDetector(Transport& transport, const SequenceCall& call, const FingerprintExchange& exchange)
      : transport_(transport), call_(call), exchange_(exchange) {}

  /// Until the own counter `idx` of the pad is at least the call's epoch; `peer` raises it.
  /// @throws Disagreement when a rank has told that it means another call; Timeout naming the rank
  ///   at the end of the notes that begin with `peer`
  void wait(const SignalPad& pad, std::int64_t idx, Rank peer);

 private:
  void note(std::int32_t peer);
  [[nodiscard]] std::int32_t silent_rank(std::int32_t peer) const;

  Transport& transport_;
  const SequenceCall& call_;
  const FingerprintExchange& exchange_;
  std::uint64_t num_notes_ = 0;
};

}  // namespace waybill::detail
