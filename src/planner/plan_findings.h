#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "waybill/planner/attention_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::detail {

/// Collects what is wrong with an AttentionPlan, up to a number.
class PlanFindings {
 public:
  PlanFindings(std::vector<Finding> findings, std::int64_t most)
      : findings_(std::move(findings)), most_(most) {}

  void add(FindingKind kind, const char* field, std::int64_t rank, std::int64_t shard,
           const std::string& got, const std::string& expected);
  void compare(const char* field, std::int64_t rank, std::int64_t got, std::int64_t expected);
  void compare(const char* field, const std::vector<LinkBytes>& got,
               const std::vector<LinkBytes>& expected);
  void append(std::vector<Finding> more) {
    for (Finding& finding : more)
      if (!full()) findings_.push_back(std::move(finding));
  }

  [[nodiscard]] bool none() const { return findings_.empty(); }
  [[nodiscard]] bool full() const { return std::ssize(findings_) >= most_; }
  [[nodiscard]] std::vector<Finding> take() { return std::move(findings_); }

 private:
  std::vector<Finding> findings_;
  std::int64_t most_;
};

/// Bytes from rank to rank; none where they are the same.
void add_link_bytes(std::vector<LinkBytes>& links, std::int64_t src, std::int64_t dst,
                    std::int64_t num_bytes, std::int64_t ranks_per_node);

/// Carries the relay schedule out, hop by hop.
void check_relay(const AttentionPlan& plan, const QkvRouting& routing,
                 const std::vector<LinkBytes>& q_links, PlanFindings& findings);

}  // namespace waybill::detail
