#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/parallel_for.h"
#include "waybill/routing/validate.h"

namespace waybill::detail {

/// Findings up to a limit.
class FindingList {
 public:
  explicit FindingList(std::int64_t limit) : limit_(limit) {}

  [[nodiscard]] bool full() const { return std::ssize(findings_) >= limit_; }
  void add(Finding finding) {
    if (!full()) findings_.push_back(std::move(finding));
  }
  void append(FindingList&& other) {
    for (Finding& finding : other.findings_) add(std::move(finding));
  }
  [[nodiscard]] bool empty() const { return findings_.empty(); }
  [[nodiscard]] std::vector<Finding> take() { return std::move(findings_); }
  [[nodiscard]] std::int64_t limit() const { return limit_; }

 private:
  std::int64_t limit_;
  std::vector<Finding> findings_;
};

/// Calls check(rank, list) for all ranks in parallel; the findings come in the order of the ranks.
template <class Check>
void check_ranks(std::int64_t world_size, int num_threads, FindingList& findings,
                 const Check& check) {
  std::vector<FindingList> lists(static_cast<std::size_t>(world_size),
                                 FindingList(findings.limit()));
  parallel_for(world_size, 1, num_threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) check(r, lists[static_cast<std::size_t>(r)]);
  });
  for (FindingList& list : lists) findings.append(std::move(list));
}

}  // namespace waybill::detail
