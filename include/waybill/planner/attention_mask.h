#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// Which keys a query of its document meets: those before it and itself, or only the latest
/// `window` of these, or all. Positions are tokens from the beginning of the document.
struct AttentionMask {
  std::int64_t window = 0;  ///< keys a query meets, itself included; 0: all that the kind allows
  MaskKind kind = MaskKind::causal;  ///< full: without a window

  [[nodiscard]] bool has_window() const { return window > 0; }
  [[nodiscard]] bool is_full() const { return kind == MaskKind::full; }

  /// The first key that the query at `position` meets.
  [[nodiscard]] std::int64_t first_key(std::int64_t position) const {
    return window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - window);
  }

  /// Exact number of (query, key) pairs of the queries [begin, end) of a document of `doc_len`
  /// tokens: the area of the mask. Fits for doc_len <= 2^31.
  [[nodiscard]] std::int64_t pairs(std::int64_t begin, std::int64_t end,
                                   std::int64_t doc_len) const {
    return is_full() ? (end - begin) * doc_len : pairs_before(end) - pairs_before(begin);
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

/// "causal", "causal, window 4096", "full".
[[nodiscard]] std::string to_string(const AttentionMask& mask);

}  // namespace waybill
