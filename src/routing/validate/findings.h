#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/routing/validate.h"

namespace waybill::validation {

/// Where something is wrong; -1: does not apply.
struct Place {
  std::int64_t rank = -1;
  std::int64_t shard = -1;
  std::int64_t copy = -1;
};

/// Collects findings up to a limit. Checks go on after a finding as long as it is safe, and ask
/// full() on their bad path only.
class Findings {
 public:
  explicit Findings(std::int64_t max_findings) : max_(max_findings < 1 ? 1 : max_findings) {}

  [[nodiscard]] bool full() const { return std::ssize(list_) >= max_; }
  [[nodiscard]] std::int64_t count() const { return std::ssize(list_); }
  [[nodiscard]] std::vector<Finding> take() && { return std::move(list_); }

  void add(Finding finding) {
    if (!full()) list_.push_back(std::move(finding));
  }
  void append(std::vector<Finding> more) {
    for (Finding& finding : more) add(std::move(finding));
  }

  /// `got` and `expected` are anything that prints.
  template <class Got, class Expected>
  [[gnu::cold, gnu::noinline]] void add(FindingKind kind, const char* table, const char* field,
                                        Place place, const Got& got, const Expected& expected) {
    if (full()) return;
    list_.push_back({.kind = kind,
                     .table = table,
                     .field = field,
                     .rank = place.rank,
                     .shard = place.shard,
                     .copy = place.copy,
                     .got = concat(got),
                     .expected = concat(expected)});
  }

 private:
  std::int64_t max_;
  std::vector<Finding> list_;
};

/// a + b >= 0, or the largest number where that is more. For a, b >= 0.
[[nodiscard]] inline std::int64_t add_rows(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

}  // namespace waybill::validation
