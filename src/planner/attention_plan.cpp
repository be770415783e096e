#include "waybill/planner/attention_plan.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <ostream>
#include <sstream>

#include "planner/node_routes.h"
#include "waybill/core/error.h"
#include "waybill/planner/relay.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

constexpr std::string_view names[] = {"direct", "once_per_node", "relay"};

}  // namespace

std::string_view to_string(TransferMode transfer) { return names[static_cast<int>(transfer)]; }

std::optional<TransferMode> transfer_from_name(std::string_view name) {
  for (const TransferMode transfer :
       {TransferMode::direct, TransferMode::once_per_node, TransferMode::relay}) {
    if (name == to_string(transfer)) return transfer;
  }
  return std::nullopt;
}

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

std::vector<std::int64_t> AttentionPlan::bytes_out() const {
  return bytes_out(TransferMode::direct);
}

std::vector<std::int64_t> AttentionPlan::bytes_out(TransferMode transfer) const {
  const std::vector<LinkBytes> from = links_of(transfer);
  std::vector<std::int64_t> sums(from.size());
  std::transform(from.begin(), from.end(), sums.begin(), [](const auto& l) { return l.out(); });
  return sums;
}

std::vector<LinkBytes> AttentionPlan::links_of(TransferMode transfer) const {
  if (transfer == TransferMode::relay && !relay.empty()) return relay.links;
  if (transfer != TransferMode::once_per_node) return links;
  const Topology topology{plan.world_size, options.hardware.ranks_per_node};
  require(topology.ranks_per_node >= 1, "AttentionPlan::links_of: options.hardware.ranks_per_node",
          " = ", topology.ranks_per_node, ", expected >= 1");
  const bool full_nodes = topology.world_size % topology.ranks_per_node == 0;
  if (!full_nodes || topology.num_nodes() < 2) return links;
  const QkvRouting routing = compute_qkv_routing(plan);
  auto sums = route_over_nodes(routing.fwd_kv, topology, options.model.kv_row_bytes()).links;
  detail::add_links(sums, direct_links(routing.fwd_q, topology, options.model.q_row_bytes()));
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

double AttentionPlan::limit_seconds(TransferMode transfer) const {
  return waybill::limit_seconds(links_of(transfer), options.hardware.nvlink_bytes_per_second,
                                options.hardware.network_bytes_per_second);
}

namespace {

std::string mib(double num_bytes) {
  std::ostringstream text;
  text.setf(std::ios::fixed);
  text.precision(1);
  text << num_bytes / (1 << 20) << " MiB";
  return text.str();
}

std::string milliseconds(double seconds) {
  std::ostringstream text;
  text.setf(std::ios::fixed);
  text.precision(3);
  text << seconds * 1e3 << " ms";
  return text.str();
}

/// "unknown", and why, where a plan is so odd that its links cannot be computed.
std::string limit_text(const AttentionPlan& plan, TransferMode transfer) {
  try {
    return milliseconds(plan.limit_seconds(transfer));
  } catch (const Error& error) {
    return concat("unknown (", error.what(), ")");
  }
}

void write_bytes(std::ostream& out, const char* name, const std::vector<std::int64_t>& bytes) {
  const auto most = std::max_element(bytes.begin(), bytes.end());
  out << name << " a rank: mean " << mib(mean_of(bytes)) << ", largest "
      << mib(static_cast<double>(largest(bytes)));
  if (most != bytes.end() && *most > 0) out << " (rank " << most - bytes.begin() << ')';
  out << '\n';
}

}  // namespace

std::string to_string(const AttentionPlan& plan) {
  std::ostringstream out;
  const auto most = std::max_element(plan.work.begin(), plan.work.end());
  out << "AttentionPlan: " << plan.plan.world_size << " ranks, " << plan.plan.num_documents()
      << " documents, " << plan.plan.num_shards() << " shards, "
      << std::accumulate(plan.home_tokens.begin(), plan.home_tokens.end(), std::int64_t{0})
      << " tokens, " << to_string(plan.options.mask);
  out << ", " << to_string(plan.plan.kv_layout) << '\n';
  out << "work: largest / mean ";
  out.setf(std::ios::fixed);
  out.precision(4);
  out << plan.imbalance();
  if (most != plan.work.end() && *most > 0) out << " (rank " << most - plan.work.begin() << ')';
  out << (plan.balanced() ? "" : ", over the target") << '\n';
  write_bytes(out, "bytes in", plan.bytes_in());
  write_bytes(out, "bytes out", plan.bytes_out());
  if (!plan.relay.empty()) {
    write_bytes(out, "bytes out with relay", plan.bytes_out(TransferMode::relay));
    out << "relay: " << plan.relay.hops.size() << " hops, " << plan.relay.num_stages << " stages\n";
  }
  out << "limit: " << limit_text(plan, TransferMode::direct);
  if (plan.plan.world_size > plan.options.hardware.ranks_per_node)
    out << ", once per node " << limit_text(plan, TransferMode::once_per_node);
  if (!plan.relay.empty()) out << ", with relay " << limit_text(plan, TransferMode::relay);
  out << '\n';
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const AttentionPlan& plan) {
  return out << to_string(plan);
}

}  // namespace waybill
