#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "waybill/core/random.h"

namespace waybill {

/// A histogram of document lengths.
struct LengthDistribution {
  struct Bucket {
    std::int64_t lo = 0;    ///< tokens, inclusive
    std::int64_t hi = 0;    ///< tokens, exclusive
    std::int64_t docs = 0;  ///< documents counted
    double mean_len = 0;    ///< tokens; 0: not known, taken as the middle
  };
  std::string name;
  std::string source;  ///< where the figures come from
  std::vector<Bucket> buckets;
  std::int64_t max_len = 0;  ///< longest document; 0: not known

  /// @throws InvalidArgument unless buckets are non-empty ranges with counts >= 0, one of them > 0.
  void check() const;
};

/// Draws documents until they fill `num_tokens` exactly; the last one is cut to fit. Lengths are
/// uniform on each side of the bucket's mean, so that the mean is kept; at least 1 token.
/// @throws InvalidArgument when distribution.check() does, or num_tokens < 0.
[[nodiscard]] std::vector<std::int64_t> sample_documents(const LengthDistribution& distribution,
                                                         std::int64_t num_tokens,
                                                         std::uint64_t seed);

}  // namespace waybill
