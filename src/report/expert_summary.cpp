#include "waybill/report/expert_summary.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

#include "moe/input_checks.h"
#include "moe/token_routes.h"
#include "report/format.h"
#include "report/plan_figures.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using Figure = std::int64_t ExpertRankFigures::*;

using detail::spread_of;

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
  return detail::sum_of(ranks, &ExpertRankFigures::tokens);
}

Spread ExpertSummary::computed() const { return spread_of(ranks, &ExpertRankFigures::computed); }

ExpertLimit ExpertSummary::limit(const LinkSpeeds& speeds) const {
  ExpertLimit limit;
  for (const auto& [figure, network, direction] :
       {std::tuple{&ExpertRankFigures::node_in, false, Direction::in},
        {&ExpertRankFigures::node_out, false, Direction::out},
        {&ExpertRankFigures::network_in, true, Direction::in},
        {&ExpertRankFigures::network_out, true, Direction::out}}) {
    const double speed = detail::speed_of(speeds, network);
    require(std::isfinite(speed) && speed > 0, "ExpertSummary: a speed is ", speed,
            ", expected a number > 0");
    const Spread spread = spread_of(ranks, figure);
    const double seconds = static_cast<double>(spread.max) * static_cast<double>(row_bytes) / speed;
    if (seconds <= limit.seconds) continue;
    limit = {spread.max_rank, network, direction, spread.max, spread.mean, seconds};
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
  require(options.spare_experts == 0, "summarize_experts: spare_experts = ", options.spare_experts,
          ", expected 0: price_expert_copies counts copies");
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

namespace {

using detail::labelled;
using detail::times;

const char* link_of(const ExpertLimit& limit) { return limit.network ? "the network" : "NVLink"; }

/// A combine returns rows of token_dtype, whatever came.
const char* calls_of(const ExpertSummary& s) {
  const std::int64_t combine_bytes = s.config.hidden * dtype_bytes(s.config.token_dtype);
  return s.row_bytes == combine_bytes ? "no dispatch, and no combine," : "no dispatch";
}

std::string limit_sentence(const ExpertSummary& s, const LinkSpeeds& speeds) {
  const ExpertLimit limit = s.limit(speeds);
  if (limit.seconds == 0) return "No row crosses a link: every token stays on its rank.";
  return concat("Rank ", limit.rank, " sets the limit: it ",
                limit.direction == Direction::in ? "receives " : "sends ",
                format_bytes(limit.rows * s.row_bytes), " over ", link_of(limit), ", ",
                times(static_cast<double>(limit.rows) / limit.mean_rows), " the mean; at ",
                detail::rate(detail::speed_of(speeds, limit.network)), " each way, ", calls_of(s),
                " can be faster than ", format_seconds(limit.seconds), ".");
}

std::string work_sentence(const ExpertSummary& s) {
  const Spread computed = s.computed();
  std::string text =
      concat(computed.imbalance() <= 1.05 ? "Experts' work is even" : "Experts' work is uneven",
             ": rank ", computed.max_rank, " computes the most, ",
             format_plural(computed.max, "row"), ", ", times(computed.imbalance()), " the mean");
  const auto top = std::ranges::max_element(s.expert_entries);
  const auto all = computed.mean * static_cast<double>(s.ranks.size());
  const double share = static_cast<double>(*top) * static_cast<double>(s.expert_entries.size());
  text += concat("; expert ", top - s.expert_entries.begin(), " alone has ", format_count(*top),
                 ", ", times(share / all), " an even share");
  const auto idle = std::ranges::count(s.expert_entries, 0);
  if (idle > 0)
    text += concat("; ", format_plural(idle, "expert"), idle == 1 ? " has" : " have", " none");
  return text + ".";
}

/// Empty where another placement would change little.
std::string placement_sentence(const ExpertSummary& s) {
  const std::vector<std::int32_t> placement = place_experts(s);
  std::vector<std::int64_t> topk_slots(s.ranks.size());
  for (std::size_t e = 0; e < placement.size(); ++e)
    topk_slots[placement[e]] += s.expert_entries[e];
  const Spread now = s.computed();
  const double then = static_cast<double>(std::ranges::max(topk_slots)) / now.mean;
  if (now.imbalance() < 1.05 || then > 0.98 * now.imbalance()) return "";
  return concat("If experts were placed by load, ", s.config.num_experts_per_rank(),
                " per rank, the busiest rank would have ", times(then), " the mean.");
}

std::string saving_sentence(const ExpertSummary& s) {
  const auto sum = [&](Figure figure) {
    return static_cast<double>(detail::sum_of(s.ranks, figure));
  };
  const double received = sum(&ExpertRankFigures::received);
  const double computed = sum(&ExpertRankFigures::computed);
  const double tokens = sum(&ExpertRankFigures::tokens);
  std::string text = concat("On average a token goes to ", format_fixed(computed / tokens, 2),
                            " experts on ", format_fixed(received / tokens, 2), " ranks");
  if (s.config.num_nodes() > 1)
    text += concat(", and crosses the network ",
                   format_fixed(sum(&ExpertRankFigures::network_out) / tokens, 2), " times");
  const double saved = 1 - received / computed;
  return concat(text, "; sending it only once to each rank saves ", format_fixed(100 * saved, 0),
                "% of the rows.");
}

/// Empty where nothing crosses a link.
std::string ways_sentence(const ExpertSummary& s, const LinkSpeeds& speeds) {
  const ExpertWays ways = compare_expert_ways(s, speeds);
  if (ways.waybill == 0) return "";
  std::string text =
      concat("By the links alone a dispatch and its combine take Waybill ",
             format_seconds(ways.waybill), " (a row per token and rank), all_to_all ",
             format_seconds(ways.all_to_all), " (a row per topk slot), all_gather and ",
             "reduce_scatter ", format_seconds(ways.all_gather), " (every token to every rank): ");
  constexpr double near = 1.05;
  const bool slots = ways.all_to_all <= near * ways.waybill;
  const bool gathers = ways.all_gather <= near * ways.waybill;
  if (ways.all_gather < ways.waybill && ways.all_gather <= ways.all_to_all) {
    text += concat("all_gather wins, Waybill takes ", times(ways.waybill / ways.all_gather),
                   " as long: its rows load some links more than others");
  } else if (ways.all_to_all < ways.waybill) {
    text += concat("all_to_all wins, Waybill takes ", times(ways.waybill / ways.all_to_all),
                   " as long: it forwards rows inside a node");
  } else if (slots || gathers) {
    text += concat("Waybill moves hardly less than ", slots ? "all_to_all" : "all_gather",
                   slots && gathers ? " and all_gather" : "");
  } else {
    text += concat("Waybill wins, the others take at least ",
                   times(std::min(ways.all_to_all, ways.all_gather) / ways.waybill), " as long");
  }
  return text + ".";
}

std::string head_block(const ExpertSummary& s, const TextStyle& style) {
  const EPConfig& c = s.config;
  const std::int64_t dropped = detail::sum_of(s.ranks, &ExpertRankFigures::dropped);
  std::string text = detail::heading("Dispatch (combine: the same rows, the other way)", style);
  text +=
      labelled("tokens", concat(format_count(s.num_tokens()), " of ", format_bytes(s.row_bytes),
                                ", top-", c.topk, " of ", format_plural(c.num_experts, "expert"),
                                ", ", format_plural(dropped, "topk slot"), " dropped"));
  text += labelled("ranks", concat(c.world_size, " on ", format_plural(c.num_nodes(), "node"), ", ",
                                   format_plural(c.num_experts_per_rank(), "expert"), " each"));
  return text;
}

std::int64_t in_bytes(const ExpertSummary& s, const ExpertRankFigures& rank) {
  return (rank.node_in + rank.network_in) * s.row_bytes;
}
std::int64_t out_bytes(const ExpertSummary& s, const ExpertRankFigures& rank) {
  return (rank.node_out + rank.network_out) * s.row_bytes;
}

std::string rank_block(const ExpertSummary& s, const LinkSpeeds& speeds, const TextStyle& style) {
  std::vector<std::int64_t> bytes;
  for (const ExpertRankFigures& rank : s.ranks)
    bytes.push_back(std::max(in_bytes(s, rank), out_bytes(s, rank)));
  const std::int64_t max_bytes = std::ranges::max(bytes);
  const ExpertLimit limit = s.limit(speeds);
  const Spread computed = s.computed();
  const auto line_of = [&](std::int32_t r) {
    const ExpertRankFigures& rank = s.ranks[r];
    return detail::rank_line(r, rank.tokens, {rank.computed, computed.max},
                             format_count(rank.computed), in_bytes(s, rank), out_bytes(s, rank),
                             max_bytes, limit.seconds > 0 && r == limit.rank, style);
  };
  const std::int32_t always[] = {limit.rank, computed.max_rank};
  return detail::heading("  rank     tokens  rows computed      bytes in           bytes out",
                         style) +
         detail::rank_lines(bytes, always, line_of, style);
}

}  // namespace

std::vector<std::string> explain_experts(const ExpertSummary& summary, const LinkSpeeds& speeds) {
  if (summary.computed().max == 0) return {"No token goes anywhere: every topk slot is dropped."};
  std::vector<std::string> sentences = {limit_sentence(summary, speeds), work_sentence(summary)};
  const std::string placement = placement_sentence(summary);
  if (!placement.empty()) sentences.push_back(placement);
  sentences.push_back(saving_sentence(summary));
  const std::string ways = ways_sentence(summary, speeds);
  if (!ways.empty()) sentences.push_back(ways);
  return sentences;
}

std::string expert_text(const ExpertSummary& summary, const LinkSpeeds& speeds,
                        const TextStyle& style) {
  return concat(head_block(summary, style), "\n", rank_block(summary, speeds, style), "\n",
                detail::meaning("What it means", explain_experts(summary, speeds), style));
}

namespace {

/// Most tokens of a rank in a layer that sends rows without waiting for counts.
constexpr std::int64_t few_tokens = 128;

const char* label_of(ExpertCallKind kind) {
  constexpr const char* labels[] = {"dispatch, grouped",     "dispatch, known routing",
                                    "combine, compact rows", "combine with local sums",
                                    "combine, grouped rows", "dispatch, low latency",
                                    "combine, low latency"};
  return labels[static_cast<std::size_t>(kind)];
}

bool is_low_latency(ExpertCallKind kind) {
  return kind == ExpertCallKind::low_latency_dispatch ||
         kind == ExpertCallKind::low_latency_combine;
}

std::string line_of(const std::string& label, const ExpertCallPrediction& call) {
  const auto cell = [](double seconds) {
    return detail::pad_left(seconds > 0 ? format_seconds(seconds) : "-", 9);
  };
  return concat("  ", detail::pad_right(label, 24), cell(call.seconds), cell(call.begin_seconds),
                cell(call.network_seconds), cell(call.nvlink_seconds), cell(call.block_seconds),
                cell(call.end_seconds), "\n");
}

std::string basis(const EPConfig& config, const ExpertCostOptions& options, bool low_latency) {
  std::string text =
      concat("Predicted for ", format_plural(options.costs.num_sms, "multiprocessor"),
             ", nothing was run. Rows on the network, on NVLink and through multiprocessors move "
             "side by side: a call takes what is before them, the longest of the three, and what "
             "is behind");
  if (config.num_nodes() == 1) return text + ".";
  text += concat(". Between nodes ", to_string(options.costs.path),
                 options.costs.path == ExpertPath::waiting
                     ? " puts: a block awaits each before the next"
                     : " puts: many are in flight, rows are forwarded piece by piece, and rows to "
                       "other nodes do not wait for counting and adding",
                 "; a message takes ", format_seconds(options.step.network_message_seconds),
                 " (nominal)");
  if (low_latency)
    text += ". Low latency goes straight to the final ranks, which is not done over network cards";
  return text + ".";
}

}  // namespace

std::string expert_calls_text(const EPConfig& config, const EPDispatchOptions& dispatch,
                              std::span<const std::vector<std::int32_t>> ids,
                              const ExpertCostOptions& options, const TextStyle& style) {
  std::string text = detail::heading(
      "  call                        total   before  network   NVLink      SMs   behind", style);
  const bool low_latency = config.max_tokens <= few_tokens;
  const auto calls = predict_experts(config, dispatch, ids, options);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const ExpertCallKind kind = calls[i].kind;
    if (!low_latency && is_low_latency(kind)) continue;
    text += line_of(label_of(kind), calls[i]);
  }
  return text + detail::wrapped(basis(config, options, low_latency), style);
}

}  // namespace waybill
