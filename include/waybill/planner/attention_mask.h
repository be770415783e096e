#pragma once

#include <algorithm>
#include <cstdint>

namespace waybill {

/// Which keys a query of its document meets: those before it and itself, or only the latest
/// `window` of these. Positions are tokens from the beginning of the document.
struct AttentionMask {
  std::int64_t window = 0;  ///< keys a query meets, itself included; 0: all before it (causal)

  [[nodiscard]] bool is_causal() const { return window == 0; }

  /// The first key that the query at `position` meets.
  [[nodiscard]] std::int64_t first_key(std::int64_t position) const {
    return window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - window);
  }

  /// Exact number of (query, key) pairs of the queries [begin, end) of a document: the area of the
  /// mask. Fits for end <= 2^31.
  [[nodiscard]] std::int64_t pairs(std::int64_t begin, std::int64_t end) const {
    return pairs_before(end) - pairs_before(begin);
  }

  friend bool operator==(const AttentionMask&, const AttentionMask&) = default;

 private:
  // Queries [0, end): position p meets min(p + 1, window) keys.
  [[nodiscard]] std::int64_t pairs_before(std::int64_t end) const {
    const std::int64_t ramp = window == 0 ? end : std::min(end, window);
    return (ramp & 1) == 0 ? ramp / 2 * (ramp + 1) + (end - ramp) * window
                           : (ramp + 1) / 2 * ramp + (end - ramp) * window;
  }
};

}  // namespace waybill
