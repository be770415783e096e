#include "waybill/report/expert_summary.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "moe/input_checks.h"
#include "moe/token_routes.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using Figure = std::int64_t ExpertRankFigures::*;

Spread spread_of(std::span<const ExpertRankFigures> ranks, Figure figure) {
  const auto worst =
      std::ranges::max_element(ranks, {}, [&](const ExpertRankFigures& r) { return r.*figure; });
  Spread spread;
  spread.max = *worst.*figure;
  spread.max_rank = static_cast<std::int32_t>(worst - ranks.begin());
  for (const ExpertRankFigures& rank : ranks) spread.mean += static_cast<double>(rank.*figure);
  spread.mean /= static_cast<double>(ranks.size());
  return spread;
}

void count_slot(std::int32_t source, ExpertRankFigures& to, ExpertRankFigures& own,
                std::int32_t rank, const EPConfig& config) {
  if (rank == source) return;
  const bool network = rank / config.local_world_size != source / config.local_world_size;
  ++(network ? to.slot_network_in : to.slot_node_in);
  ++(network ? own.slot_network_out : own.slot_node_out);
}

void count_tokens(std::int32_t source, std::span<const std::int32_t> ids, TokenRoutes& routes,
                  ExpertSummary& summary) {
  const EPConfig& config = summary.config;
  std::vector<ExpertRankFigures>& ranks = summary.ranks;
  ExpertRankFigures& own = ranks[source];
  own.tokens = std::ssize(ids) / config.topk;
  routes.begin(source);
  for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
    const std::int32_t expert = ids[i];
    const TopkRoute route = routes.next(i / config.topk, expert);
    if (route.rank == config.world_size) {
      ++own.dropped;
      continue;
    }
    ++summary.expert_entries[expert];
    ++ranks[route.rank].computed;
    count_slot(source, ranks[route.rank], own, route.rank, config);
    if (route.to_node) {
      ++own.network_out;
      ++ranks[route.forwarder].network_in;
    }
    if (!route.to_rank) continue;
    ++ranks[route.rank].received;
    if (route.rank == route.forwarder) continue;
    ++ranks[route.forwarder].node_out;
    ++ranks[route.rank].node_in;
  }
}

}  // namespace

std::int64_t ExpertSummary::num_tokens() const {
  std::int64_t tokens = 0;
  for (const ExpertRankFigures& rank : ranks) tokens += rank.tokens;
  return tokens;
}

Spread ExpertSummary::computed() const { return spread_of(ranks, &ExpertRankFigures::computed); }

ExpertLimit ExpertSummary::limit(const LinkSpeeds& speeds) const {
  struct Way {
    Figure figure;
    bool network;
    Direction direction;
  };
  constexpr Way ways[] = {{&ExpertRankFigures::node_in, false, Direction::in},
                          {&ExpertRankFigures::node_out, false, Direction::out},
                          {&ExpertRankFigures::network_in, true, Direction::in},
                          {&ExpertRankFigures::network_out, true, Direction::out}};
  ExpertLimit limit;
  for (const Way& way : ways) {
    const double speed =
        way.network ? speeds.network_bytes_per_second : speeds.nvlink_bytes_per_second;
    require(std::isfinite(speed) && speed > 0, "ExpertSummary: a speed is ", speed,
            ", expected a number > 0");
    const Spread spread = spread_of(ranks, way.figure);
    const double seconds = static_cast<double>(spread.max) * static_cast<double>(row_bytes) / speed;
    if (seconds <= limit.seconds) continue;
    limit = {spread.max_rank, way.network, way.direction, spread.max, spread.mean, seconds};
  }
  return limit;
}

ExpertWays compare_expert_ways(const ExpertSummary& summary, const LinkSpeeds& speeds) {
  const double row_bytes = static_cast<double>(summary.row_bytes);
  // Combine returns what dispatch brought, in token_dtype.
  const double both = row_bytes + static_cast<double>(summary.config.hidden *
                                                      dtype_bytes(summary.config.token_dtype));
  const auto seconds = [&](double node_rows, double network_rows) {
    return std::max(node_rows * both / speeds.nvlink_bytes_per_second,
                    network_rows * both / speeds.network_bytes_per_second);
  };
  const auto most = [&](Figure in, Figure out) {
    return static_cast<double>(
        std::max(spread_of(summary.ranks, in).max, spread_of(summary.ranks, out).max));
  };
  // Every rank gets all tokens: those of other nodes by its share of their links, the rest inside.
  const std::int32_t local = summary.config.local_world_size;
  const std::int64_t tokens = summary.num_tokens();
  double node_rows = 0;
  double network_rows = 0;
  for (std::int32_t first = 0; first < summary.config.world_size; first += local) {
    std::int64_t of_node = 0;
    std::int64_t least = tokens;
    for (std::int32_t r = first; r < first + local; ++r) {
      of_node += summary.ranks[r].tokens;
      least = std::min(least, summary.ranks[r].tokens);
    }
    const double elsewhere = static_cast<double>(tokens - of_node) / local;
    node_rows = std::max(node_rows, static_cast<double>(of_node - least) + elsewhere * (local - 1));
    network_rows = std::max(network_rows, elsewhere);
  }
  return {.waybill = seconds(most(&ExpertRankFigures::node_in, &ExpertRankFigures::node_out),
                             most(&ExpertRankFigures::network_in, &ExpertRankFigures::network_out)),
          .all_to_all = seconds(
              most(&ExpertRankFigures::slot_node_in, &ExpertRankFigures::slot_node_out),
              most(&ExpertRankFigures::slot_network_in, &ExpertRankFigures::slot_network_out)),
          .all_gather = seconds(node_rows, network_rows)};
}

ExpertSummary summarize_experts(const EPConfig& config, const EPDispatchOptions& options,
                                std::span<const std::vector<std::int32_t>> ids) {
  config.check("summarize_experts");
  options.check(config, "summarize_experts");
  detail::check_ids("summarize_experts", config, ids);
  ExpertSummary summary;
  summary.config = config;
  summary.row_bytes = payload_row_bytes(config, options) + scale_row_bytes(config, options);
  summary.ranks.resize(config.world_size);
  summary.expert_entries.resize(config.num_experts);
  TokenRoutes routes(config, 0);
  for (std::int32_t r = 0; r < config.world_size; ++r) count_tokens(r, ids[r], routes, summary);
  return summary;
}

std::vector<std::int32_t> place_experts(const ExpertSummary& summary) {
  const EPConfig& config = summary.config;
  std::vector<std::int32_t> order(config.num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](std::int32_t e) { return summary.expert_entries[e]; });
  std::vector<std::int32_t> experts(config.world_size);
  std::vector<std::int32_t> placement(config.num_experts);
  using Load = std::pair<std::int64_t, std::int32_t>;  // topk slots of a rank that has room
  std::vector<Load> loads;
  for (std::int32_t r = 0; r < config.world_size; ++r) loads.emplace_back(0, r);
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least({}, std::move(loads));
  for (const std::int32_t expert : order) {
    const auto [topk_slots, rank] = least.top();
    least.pop();
    placement[expert] = rank;
    if (++experts[rank] < config.num_experts_per_rank())
      least.emplace(topk_slots + summary.expert_entries[expert], rank);
  }
  return placement;
}

}  // namespace waybill
