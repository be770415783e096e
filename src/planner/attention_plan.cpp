#include "waybill/planner/attention_plan.h"

#include <algorithm>
#include <numeric>
#include <ostream>
#include <sstream>

#include "waybill/core/at.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

double mean_of(const std::vector<std::int64_t>& values) {
  return values.empty() ? 0
                        : std::accumulate(values.begin(), values.end(), 0.0) /
                              static_cast<double>(values.size());
}

std::int64_t largest(const std::vector<std::int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

}  // namespace

std::vector<std::int64_t> AttentionPlan::bytes_in() const {
  std::vector<std::int64_t> sums(links.size());
  std::transform(links.begin(), links.end(), sums.begin(), [](const auto& l) { return l.in(); });
  return sums;
}

std::vector<std::int64_t> AttentionPlan::bytes_out() const { return bytes_out(Transfer::direct); }

std::vector<std::int64_t> AttentionPlan::bytes_out(Transfer transfer) const {
  const auto& from = transfer == Transfer::relay && !relay.empty() ? relay.links : links;
  std::vector<std::int64_t> sums(from.size());
  std::transform(from.begin(), from.end(), sums.begin(), [](const auto& l) { return l.out(); });
  return sums;
}

double AttentionPlan::imbalance() const {
  const double mean = mean_of(work);
  return mean > 0 ? static_cast<double>(largest(work)) / mean : 1;
}

bool AttentionPlan::balanced() const {
  const double mean = mean_of(work);
  return static_cast<double>(largest(work)) <=
         std::max(options.imbalance_target * mean, mean + static_cast<double>(block_work));
}

double AttentionPlan::limit_seconds(Transfer transfer) const {
  const auto& used = transfer == Transfer::relay && !relay.empty() ? relay.links : links;
  std::int64_t nvlink = 0;
  std::int64_t network = 0;
  for (const LinkBytes& link : used) {
    nvlink = std::max({nvlink, link.nvlink_in, link.nvlink_out});
    network = std::max({network, link.network_in, link.network_out});
  }
  return std::max(static_cast<double>(nvlink) / options.hardware.nvlink_bytes_per_second,
                  static_cast<double>(network) / options.hardware.network_bytes_per_second);
}

}  // namespace waybill
