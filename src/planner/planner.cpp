#include "waybill/planner/planner.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <numeric>
#include <ostream>
#include <sstream>
#include <utility>

#include "balance.h"
#include "core/checks.h"
#include "figures.h"
#include "planner/node_routes.h"
#include "waybill/core/error.h"
#include "waybill/core/topology.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

constexpr std::int64_t max_tokens = std::int64_t{1} << 40;
constexpr std::int64_t max_hidden = std::int64_t{1} << 24;

using detail::check_not_negative;
using detail::check_range;

void check_speed(const char* who, const char* field, double got) {
  require(LinkSpeeds::makes_sense(got), who, ": ", field, " = ", got, ", expected ",
          LinkSpeeds::least, " to ", LinkSpeeds::most, " bytes per second");
}

}  // namespace

void PlannerOptions::check(const char* who) const {
  check_range(who, "world_size", world_size, 1, max_world_size);
  check_range(who, "tokens_per_rank", tokens_per_rank, 0, max_tokens / world_size);
  check_range(who, "model.q_hidden", model.q_hidden, 1, max_hidden);
  check_range(who, "model.kv_hidden", model.kv_hidden, 1, max_hidden);
  mask.check(who);
  require(prefixes.empty() || mask.kind == MaskKind::prefix, who, ": prefixes has ",
          prefixes.size(), " values, expected none: the mask is not prefix");
  for (std::size_t d = 0; d < prefixes.size(); ++d)
    check_range(who, concat("prefixes[", d, "]"), prefixes[d], 0, max_tokens);
  require(kv_layout <= KvLayout::per_rank, who, ": kv_layout = ", static_cast<int>(kv_layout),
          ", expected per_query or per_rank");
  check_range(who, "max_tokens_per_rank", max_tokens_per_rank, 0, max_tokens);
  check_range(who, "block_tokens", block_tokens, 1, std::int64_t{1} << 20);
  require(std::isfinite(imbalance_target) && imbalance_target > 1, who,
          ": imbalance_target = ", imbalance_target, ", expected a number > 1");
  check_not_negative(who, "byte_weight", byte_weight);
  check_speed(who, "hardware.nvlink_bytes_per_second", hardware.nvlink_bytes_per_second);
  check_speed(who, "hardware.network_bytes_per_second", hardware.network_bytes_per_second);
  check_not_negative(who, "hardware.message_seconds", hardware.message_seconds);
  check_not_negative(who, "hardware.pairs_per_second", hardware.pairs_per_second);
  check_range(who, "hardware.row_pairs", hardware.row_pairs, 0, std::int64_t{1} << 20);
  check_range(who, "hardware.shard_pairs", hardware.shard_pairs, 0, std::int64_t{1} << 40);
  require(byte_weight == 0 || hardware.pairs_per_second > 0, who, ": byte_weight = ", byte_weight,
          " needs hardware.pairs_per_second, got 0");
  detail::check_at_least(who, "hardware.ranks_per_node", hardware.ranks_per_node, 1);
}

struct Planner::Memory {
  detail::HomeLayout home;
  detail::Balancer balancer;
  detail::FigureCounter figures;
  detail::RelayPlanner relay;
  AttentionPlan plan;  ///< the latest result
  AttentionPlan next;  ///< in the making
  AttentionPlan best;

  /// @param lengths flat, or lists
  template <class Lengths>
  const AttentionPlan& make(Lengths lengths, const PlannerOptions& options) {
    options.check("plan_attention");
    detail::lay_out(lengths, options, home);
    compute(options);
    detail::join_chunks(home, plan.plan);
    return plan;
  }
  void compute(const PlannerOptions& options);
  void compute_next(const PlannerOptions& options, double target);
  void write_next(const PlannerOptions& options);
  [[nodiscard]] std::int32_t rank_over_capacity() const;
};

// The first rank whose buffers are too small; -1: none.
std::int32_t Planner::Memory::rank_over_capacity() const {
  const std::int64_t limit = next.options.max_tokens_per_rank;
  if (limit == 0) return -1;
  for (std::int32_t r = 0; r < next.options.world_size; ++r) {
    if (std::max(next.attention_tokens[r], next.kv_tokens[r]) > limit) return r;
  }
  return -1;
}

void Planner::Memory::write_next(const PlannerOptions& options) {
  next.options = options;
  next.options.tokens_per_rank = home.tokens_per_rank;
  detail::write_plan(home, balancer.moves(), options, next.plan);
  figures.count(home, next);
}

void Planner::Memory::compute_next(const PlannerOptions& options, double target) {
  balancer.run(home, options, target);
  write_next(options);
  if (rank_over_capacity() >= 0) {  // per_query: a document cut in two needs its keys twice
    balancer.run(home, options, detail::Balancer::no_target);
    write_next(options);
  }
  const std::int32_t over = rank_over_capacity();
  require(over < 0, "plan_attention: infeasible: rank ", over, " needs ",
          over < 0 ? 0 : std::max(next.attention_tokens[over], next.kv_tokens[over]),
          " tokens, max_tokens_per_rank has ", options.max_tokens_per_rank);
  if (options.relay) {
    relay.plan(figures.crossing(), next.plan.shard_len, next.links, next.options, next.relay);
  } else {
    next.relay = {};
  }
}

void Planner::Memory::compute(const PlannerOptions& options) {
  if (options.byte_weight == 0) {
    compute_next(options, options.imbalance_target);
    return std::swap(plan, next);
  }
  double least = 0;
  bool any = false;
  for (const double excess : {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1e9}) {
    compute_next(options, 1 + (options.imbalance_target - 1) * excess);
    const double work = static_cast<double>(*std::max_element(next.work.begin(), next.work.end()));
    const double seconds =
        work / options.hardware.pairs_per_second + options.byte_weight * next.limit_seconds();
    if (any && seconds >= least) continue;
    any = true;
    least = seconds;
    std::swap(next, best);
  }
  std::swap(plan, best);
}

Planner::Planner() : memory_(std::make_unique<Memory>()) {}
Planner::~Planner() = default;
Planner::Planner(Planner&&) noexcept = default;
Planner& Planner::operator=(Planner&&) noexcept = default;

const AttentionPlan& Planner::plan(std::span<const std::int64_t> doc_lengths,
                                   const PlannerOptions& options) {
  return memory_->make(doc_lengths, options);
}

const AttentionPlan& Planner::plan(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
                                   const PlannerOptions& options) {
  return memory_->make(rank_doc_lengths, options);
}

AttentionPlan Planner::take() { return std::exchange(memory_->plan, {}); }

AttentionPlan plan_attention(std::span<const std::int64_t> doc_lengths,
                             const PlannerOptions& options) {
  Planner planner;
  (void)planner.plan(doc_lengths, options);
  return planner.take();
}

AttentionPlan plan_attention(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
                             const PlannerOptions& options) {
  Planner planner;
  (void)planner.plan(rank_doc_lengths, options);
  return planner.take();
}

QkvPlan plan_pieces(std::span<const std::vector<DocumentRange>> rank_pieces,
                    const PlannerOptions& options) {
  options.check("plan_pieces");
  require(options.max_tokens_per_rank == 0 && options.byte_weight == 0,
          "plan_pieces: max_tokens_per_rank = ", options.max_tokens_per_rank,
          ", byte_weight = ", options.byte_weight, ", expected 0: plans of pieces have no figures");
  detail::HomeLayout home;
  detail::lay_out(rank_pieces, options, home);
  detail::Balancer balancer;
  balancer.run(home, options, options.imbalance_target);
  QkvPlan plan;
  detail::write_plan(home, balancer.moves(), options, plan);
  detail::join_chunks(home, plan);
  return plan;
}

std::string_view to_string(TransferMode transfer) {
  constexpr std::string_view names[] = {"direct", "once_per_node", "relay"};
  return names[static_cast<int>(transfer)];
}

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
  detail::check_at_least("AttentionPlan::links_of", "options.hardware.ranks_per_node",
                         topology.ranks_per_node, 1);
  const bool full_nodes = topology.world_size % topology.ranks_per_node == 0;
  if (!full_nodes || topology.num_nodes() < 2) return links;
  const QkvRouting routing = compute_qkv_routing(plan);
  auto sums = route_over_nodes(routing.fwd_kv, topology, options.model.kv_row_bytes()).links;
  const std::int64_t q_bytes = options.model.q_row_bytes();
  detail::add_links(sums, route_over_nodes(routing.fwd_q, topology, q_bytes, false).links);
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

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string mib(double num_bytes) { return fixed(num_bytes / (1 << 20), 1) + " MiB"; }

/// "unknown", and why, where a plan is so odd that its links cannot be computed.
std::string limit_text(const AttentionPlan& plan, TransferMode transfer) {
  try {
    return fixed(plan.limit_seconds(transfer) * 1e3, 3) + " ms";
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
  out << "work: largest / mean " << fixed(plan.imbalance(), 4);
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
