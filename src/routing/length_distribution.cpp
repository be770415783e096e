#include "waybill/routing/length_distribution.h"

#include <algorithm>
#include <cmath>

#include "waybill/core/error.h"

namespace waybill {
namespace {

/// Uniform in [lo, mean) or [mean, hi), in the proportion that gives the mean of the bucket.
std::int64_t draw(const LengthDistribution::Bucket& bucket, Random& random) {
  const auto lo = static_cast<double>(std::max<std::int64_t>(bucket.lo, 1));
  const auto hi = static_cast<double>(bucket.hi);
  const bool known = lo < bucket.mean_len && bucket.mean_len < hi;
  const double mean = known ? bucket.mean_len : (lo + hi) / 2;
  const bool upper = random.uniform_double() * (hi - lo) < mean - lo;
  const double low = upper ? mean : lo;
  const double high = upper ? hi : mean;
  const auto value =
      static_cast<std::int64_t>(std::round(low + random.uniform_double() * (high - low)));
  const std::int64_t shortest = std::max<std::int64_t>(bucket.lo, 1);
  return std::clamp(value, shortest, std::max(bucket.hi - 1, shortest));
}

}  // namespace

void LengthDistribution::check() const {
  require(!buckets.empty(), "LengthDistribution ", name, ": no buckets, expected at least one");
  std::int64_t total = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const Bucket& bucket = buckets[i];
    require(0 <= bucket.lo && bucket.lo < bucket.hi && bucket.hi <= (std::int64_t{1} << 40),
            "LengthDistribution ", name, ": bucket ", i, " is [", bucket.lo, ", ", bucket.hi,
            "), expected 0 <= lo < hi <= 2^40");
    require(0 <= bucket.docs && bucket.docs <= (std::int64_t{1} << 40) - total,
            "LengthDistribution ", name, ": bucket ", i, " has docs = ", bucket.docs,
            ", expected >= 0 and at most 2^40 in all");
    const auto lo = static_cast<double>(bucket.lo);
    const auto hi = static_cast<double>(bucket.hi);
    require(bucket.mean_len == 0 || (lo <= bucket.mean_len && bucket.mean_len < hi),
            "LengthDistribution ", name, ": bucket ", i, " has mean_len = ", bucket.mean_len,
            ", expected ", bucket.lo, " <= mean_len < ", bucket.hi, ", or 0");
    total += bucket.docs;
  }
  require(total > 0, "LengthDistribution ", name, ": no documents in any bucket");
}

std::vector<std::int64_t> sample_documents(const LengthDistribution& distribution,
                                           std::int64_t num_tokens, std::uint64_t seed) {
  distribution.check();
  require(0 <= num_tokens && num_tokens <= (std::int64_t{1} << 40),
          "sample_documents: num_tokens = ", num_tokens, ", expected 0..2^40");
  std::vector<std::int64_t> upto;  // documents in the buckets so far
  std::int64_t total = 0;
  for (const auto& bucket : distribution.buckets) upto.push_back(total += bucket.docs);
  Random random(seed);
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = num_tokens; left > 0; left -= lengths.back()) {
    const auto place = std::upper_bound(upto.begin(), upto.end(), random.below(total));
    const auto& bucket = distribution.buckets[static_cast<std::size_t>(place - upto.begin())];
    std::int64_t length = draw(bucket, random);
    if (distribution.max_len > 0) length = std::min(length, distribution.max_len);
    lengths.push_back(std::min(length, left));
  }
  return lengths;
}

}  // namespace waybill
