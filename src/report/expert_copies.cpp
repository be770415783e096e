#include "waybill/report/expert_copies.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <tuple>

#include "core/checks.h"
#include "html_parts.h"
#include "planner/node_routes.h"
#include "report/format.h"
#include "report/plan_figures.h"
#include "waybill/core/error.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {
namespace {

constexpr auto in_price = "price_expert_copies";
constexpr std::int32_t max_hot_experts = 8;
constexpr int matrices = 3;       // gate, up, down
constexpr int flops_per_mac = 2;  // a product and a sum

std::int64_t tiled(std::int64_t rows, std::int64_t tile) { return (rows + tile - 1) / tile * tile; }

double as_double(std::int64_t value) { return static_cast<double>(value); }

bool is_other_node(const EPConfig& config, const ExpertTransfer& one) {
  return one.source / config.local_world_size != one.target / config.local_world_size;
}

/// Rows of each rank before and after, and those of the fullest in whole tiles.
void count_rows(ExpertCopies& copies) {
  const EvenExperts& plan = copies.plan;
  const std::int32_t homes = copies.config.num_experts_per_rank();
  for (std::int32_t r = 0; r < plan.num_ranks; ++r) {
    std::int64_t before = 0, after = 0, tiles_before = 0, tiles_after = 0;
    for (std::int32_t e = r * homes; e < (r + 1) * homes; ++e) {
      before += copies.expert_rows[e];
      tiles_before += tiled(copies.expert_rows[e], copies.alignment);
    }
    for (std::int32_t s = 0; s < plan.slots_per_rank; ++s) {
      const std::int64_t quota = plan.quotas[std::int64_t{r} * plan.slots_per_rank + s];
      after += quota;
      tiles_after += tiled(quota, copies.alignment);
    }
    copies.rows_before.push_back(before);
    copies.rows_after.push_back(after);
    copies.tiled_before = std::max(copies.tiled_before, tiles_before);
    copies.tiled_after = std::max(copies.tiled_after, tiles_after);
  }
}

/// The slots as planned, without copies that take no rows.
std::vector<std::int32_t> used_slots(const ExpertCopies& copies) {
  std::vector<std::int32_t> slots = copies.plan.slots;
  const std::int32_t homes = copies.config.num_experts_per_rank();
  for (std::int64_t i = 0; i < std::ssize(slots); ++i)
    if (i % copies.plan.slots_per_rank >= homes && copies.plan.quotas[i] == 0) slots[i] = -1;
  return slots;
}

/// Transfers of one expert over the links of each rank.
std::vector<LinkBytes> count_transfers(const EPConfig& config,
                                       const std::vector<ExpertTransfer>& transfers) {
  std::vector<LinkBytes> counts(config.world_size);
  for (const ExpertTransfer& one : transfers) {
    const bool network = is_other_node(config, one);
    ++(network ? counts[one.source].network_out : counts[one.source].nvlink_out);
    ++(network ? counts[one.target].network_in : counts[one.target].nvlink_in);
  }
  return counts;
}

/// The longest way of an expert that is forwarded, one transfer after the other.
double chain_seconds(const ExpertCopies& copies, const std::vector<ExpertTransfer>& transfers,
                     const LinkSpeeds& speeds) {
  std::vector<double> there(copies.plan.slots.size());
  double longest = 0;
  for (const ExpertTransfer& one : transfers) {
    const auto slot_of = [&](std::int32_t rank, std::int32_t slot) {
      return std::int64_t{rank} * copies.plan.slots_per_rank + slot;
    };
    const double speed = detail::speed_of(speeds, is_other_node(copies.config, one));
    double& end = there[slot_of(one.target, one.target_slot)];
    end = there[slot_of(one.source, one.source_slot)] + as_double(copies.weight_bytes) / speed;
    longest = std::max(longest, end);
  }
  return longest;
}

/// Weights follow the rows of a dispatch, and gradients what backward computes: over links that
/// nothing else uses then.
void price_links(ExpertCopies& copies, const LinkSpeeds& speeds) {
  const std::vector<std::int32_t> slots = used_slots(copies);
  const EPConfig& config = copies.config;
  const ExpertSlotTable table{config.world_size, config.num_experts, slots};
  const auto transfers = plan_weight_transfers(table, config.local_world_size);
  const std::vector<LinkBytes> weights = count_transfers(config, transfers);
  const std::vector<LinkBytes> back = count_transfers(config, plan_gradient_transfers(table));
  for (std::int32_t r = 0; r < config.world_size; ++r) {
    copies.weights_sent.push_back(static_cast<std::int32_t>(weights[r].out()));
    for (const detail::LinkField& link : detail::link_fields) {
      const double speed = detail::speed_of(speeds, link.network);
      const std::int64_t count = weights[r].*link.bytes;
      const double seconds = as_double(count) * as_double(copies.weight_bytes) / speed;
      copies.after.gradients =
          std::max(copies.after.gradients,
                   as_double(back[r].*link.bytes) * as_double(copies.gradient_bytes) / speed);
      if (seconds <= copies.weight_seconds) continue;
      copies.weight_seconds = seconds;
      copies.busiest = r;
      copies.busiest_sends = link.out;
      copies.network = link.network;
      copies.busiest_weights = static_cast<std::int32_t>(count);
    }
  }
  copies.after.weights = std::max(copies.weight_seconds, chain_seconds(copies, transfers, speeds));
}

/// Calls of a step without the weights of copies.
ExpertStepSeconds step_of(const EPConfig& config, const std::vector<ExpertCallPrediction>& calls,
                          double gemm) {
  const auto seconds = [&](ExpertCallKind kind) {
    return calls[static_cast<std::size_t>(kind)].seconds;
  };
  ExpertStepSeconds step;
  step.dispatch = seconds(ExpertCallKind::grouped_dispatch);
  step.cached_dispatch = seconds(ExpertCallKind::cached_dispatch);
  step.combine = seconds(config.num_nodes() == 1 ? ExpertCallKind::summed_combine
                                                 : ExpertCallKind::grouped_combine);
  step.gemm = gemm;
  return step;
}

/// [R, E] rows of each source rank for each expert.
std::vector<std::int64_t> counts_of(const EPConfig& config,
                                    std::span<const std::vector<std::int32_t>> ids) {
  std::vector<std::int64_t> counts(std::int64_t{config.world_size} * config.num_experts);
  for (std::int64_t r = 0; r < config.world_size; ++r) {
    for (const std::int32_t id : ids[r])
      if (id < config.num_experts) ++counts[r * config.num_experts + id];
  }
  return counts;
}

}  // namespace

void ExpertCopyCosts::check(const char* who) const {
  calls.check(who);
  require(intermediate >= 1 && intermediate <= 1 << 24, who,
          ": costs.intermediate = ", intermediate, ", expected 1 to 2^24");
  detail::check_positive(who, "costs.gemm_flops_per_second", gemm_flops_per_second);
}

ExpertCopies price_expert_copies(const EPConfig& config, const EPDispatchOptions& options,
                                 std::span<const std::vector<std::int32_t>> ids,
                                 const ExpertCopyCosts& costs) {
  costs.check(in_price);
  EPDispatchOptions without = options;
  without.spare_experts = 0;
  const auto before = predict_experts(config, without, ids, costs.calls);
  const auto after = predict_experts(config, options, ids, costs.calls);
  ExpertCopies copies;
  const std::vector<std::int64_t> rows = counts_of(config, ids);
  copies.plan =
      even_experts(rows, config.world_size, config.num_experts, copy_options(config, options));
  copies.config = config;
  copies.alignment = options.expert_alignment;
  copies.expert_rows.resize(config.num_experts);
  for (std::int64_t i = 0; i < std::ssize(rows); ++i)
    copies.expert_rows[i % config.num_experts] += rows[i];
  count_rows(copies);
  const std::int64_t elements =
      detail::checked_mul(matrices * config.hidden, costs.intermediate, in_price);
  copies.weight_bytes = detail::checked_mul(elements, dtype_bytes(config.token_dtype), in_price);
  copies.gradient_bytes = detail::checked_mul(elements, 4, in_price);
  const double row_seconds = flops_per_mac * as_double(elements) / costs.gemm_flops_per_second;
  copies.before = step_of(config, before, as_double(copies.tiled_before) * row_seconds);
  copies.after = step_of(config, after, as_double(copies.tiled_after) * row_seconds);
  price_links(copies, costs.calls.links);
  return copies;
}

std::int64_t ExpertCopies::num_copies() const {
  const std::vector<std::int32_t> slots = used_slots(*this);
  return std::ranges::count_if(slots, [](std::int32_t e) { return e >= 0; }) - config.num_experts;
}

std::int64_t break_even_rows(const EPConfig& config, const ExpertCopyCosts& costs,
                             const ExpertCopyTrips& trips) {
  constexpr auto who = "break_even_rows";
  config.check(who);
  costs.check(who);
  for (const auto& [field, got, zero_too] : {std::tuple{"weights", trips.weights, true},
                                             {"gradients", trips.gradients, true},
                                             {"gemm", trips.gemm, false}}) {
    require(std::isfinite(got) && (zero_too ? got >= 0 : got > 0) && got <= 1e3, who, ": trips.",
            field, " = ", got, ", expected a number ", zero_too ? ">= 0" : "> 0");
  }
  const double speed = detail::speed_of(costs.calls.links, trips.network);
  const double bytes = trips.weights * as_double(dtype_bytes(config.token_dtype)) +
                       trips.gradients * as_double(dtype_bytes(DType::float32));
  const double rows = bytes / speed * costs.gemm_flops_per_second / (flops_per_mac * trips.gemm);
  return static_cast<std::int64_t>(std::min(std::ceil(rows), 0x1p52));
}

namespace {

/// An expert with copies, or the hottest.
struct HotExpert {
  std::int32_t expert = 0;
  std::int32_t home = 0;
  std::int64_t rows = 0;
  double share = 0;  ///< its rows over an even share
  std::int64_t at_home = 0;
  std::vector<std::int32_t> ranks;  ///< with a copy
};

/// Experts with copies, most rows first; the hottest where none has any.
std::vector<HotExpert> hot_experts(const ExpertCopies& copies) {
  const std::int32_t homes = copies.config.num_experts_per_rank();
  const std::int64_t total =
      std::accumulate(copies.rows_before.begin(), copies.rows_before.end(), std::int64_t{0});
  std::vector<HotExpert> all(copies.config.num_experts);
  for (std::int32_t e = 0; e < copies.config.num_experts; ++e) {
    const std::int64_t rows = copies.expert_rows[e];
    const double share =
        total == 0 ? 0 : as_double(rows) * as_double(copies.config.num_experts) / as_double(total);
    all[e] = {e, e / homes, rows, share, rows, {}};
  }
  const std::vector<std::int32_t> slots = used_slots(copies);
  for (std::int64_t i = 0; i < std::ssize(slots); ++i) {
    const std::int64_t slots_per_rank = copies.plan.slots_per_rank;
    if (slots[i] < 0 || i % slots_per_rank < homes) continue;
    all[slots[i]].ranks.push_back(static_cast<std::int32_t>(i / slots_per_rank));
    all[slots[i]].at_home -= copies.plan.quotas[i];
  }
  std::ranges::stable_sort(all, std::ranges::greater(), &HotExpert::rows);
  const HotExpert hottest = all.front();
  std::erase_if(all, [](const HotExpert& expert) { return expert.ranks.empty(); });
  if (all.empty()) all.push_back(hottest);
  return all;
}

std::string list_of(const std::vector<std::int32_t>& ranks, std::size_t max_ranks) {
  std::string text;
  for (std::size_t i = 0; i < std::min(ranks.size(), max_ranks); ++i)
    text += concat(i > 0 ? ", " : "", ranks[i]);
  if (ranks.size() > max_ranks) text += concat(" and ", ranks.size() - max_ranks, " more");
  return text.empty() ? "-" : text;
}

std::string signed_seconds(double seconds) {
  return concat(seconds < 0 ? "-" : "", format_seconds(std::abs(seconds)));
}

std::string hot_sentence(const ExpertCopies& copies) {
  const HotExpert hot = hot_experts(copies).front();
  const auto hottest = std::ranges::max_element(copies.expert_rows) - copies.expert_rows.begin();
  std::string text;
  if (hottest != hot.expert) {
    text = concat("Expert ", hottest, " has most rows, ", format_count(copies.expert_rows[hottest]),
                  ", and needs no copy. ");
  }
  text += concat("Expert ", hot.expert, " of rank ", hot.home,
                 " is hot: ", format_plural(hot.rows, "row"), ", ", detail::times(hot.share),
                 " an even share");
  if (hot.ranks.empty()) return text + "; it needs no copy.";
  return concat(
      text, "; ",
      hot.ranks.size() == 1 ? "1 copy leaves " : concat(hot.ranks.size(), " copies leave "),
      format_count(hot.at_home), " at home.");
}

std::string even_sentence(const ExpertCopies& copies) {
  const EvenExperts& plan = copies.plan;
  const std::int64_t before = std::ranges::max(copies.rows_before);
  return concat("The fullest rank computes ", format_plural(plan.max_rows, "row"), " instead of ",
                format_count(before), ": ",
                format_fixed(as_double(plan.max_rows) / plan.mean_rows, 3), " instead of ",
                format_fixed(as_double(before) / plan.mean_rows, 3),
                " times the mean; no choice of copies gets below ", format_count(plan.bound), ".");
}

std::string gemm_sentence(const ExpertCopies& copies, const ExpertCopyCosts& costs) {
  std::string text;
  if (copies.alignment > 1) {
    text = concat("In tiles of ", copies.alignment, " rows the fullest rank has ",
                  format_plural(copies.tiled_after, "row"), " instead of ",
                  format_count(copies.tiled_before), ". ");
  }
  return concat(text, "Its products take ", format_seconds(copies.after.gemm), " instead of ",
                format_seconds(copies.before.gemm), " forward, at ",
                format_si(costs.gemm_flops_per_second), " operations per second.");
}

std::string speed_text(const ExpertCopies& copies, const ExpertCopyCosts& costs) {
  return detail::rate(detail::speed_of(costs.calls.links, copies.network));
}

std::string weight_sentence(const ExpertCopies& copies, const ExpertCopyCosts& costs) {
  return concat("A copy is ", format_bytes(copies.weight_bytes), " of weights. Rank ",
                copies.busiest, copies.busiest_sends ? " sends " : " receives ",
                copies.busiest_weights, " of ", copies.num_copies(),
                copies.num_copies() == 1 ? " copy" : " copies", " over ",
                copies.network ? "the network" : "NVLink", ": ",
                format_seconds(copies.weight_seconds), " at ", speed_text(copies, costs), ".");
}

/// Calls move other rows, and plan.
std::string calls_sentence(const ExpertCopies& copies) {
  return concat("Rows go to other ranks: without weights a dispatch takes ",
                format_seconds(copies.after.dispatch), " instead of ",
                format_seconds(copies.before.dispatch),
                ", counting experts and planning included, "
                "a combine ",
                format_seconds(copies.after.combine), " instead of ",
                format_seconds(copies.before.combine), ".");
}

std::string hiding_sentence(const ExpertCopies& copies) {
  const double forwarded = copies.after.weights - copies.weight_seconds;
  return concat(
      "Weights follow the rows of the dispatch, so nothing hides them: ",
      format_moment(copies.after.weights), " in forward",
      forwarded > 1e-6 * copies.weight_seconds ? " until the last forwarded copy has come" : "",
      ", and again in backward.");
}

std::string gain_sentence(const ExpertCopies& copies) {
  const double forward = copies.forward_gain(), backward = copies.backward_gain();
  const char* const verdict = forward > 0 && forward + backward > 0 ? "Copies pay"
                              : forward > 0                         ? "Copies pay in forward alone"
                              : forward + backward > 0 ? "Copies pay over forward and backward"
                                                       : "Copies do not pay";
  return concat(verdict, ": forward gains ", signed_seconds(forward), ", backward ",
                signed_seconds(backward), " (products twice, the weights again, and ",
                format_bytes(copies.gradient_bytes), " of float32 gradient per copy home, ",
                format_moment(copies.after.gradients), ").");
}

std::string break_even_sentence(const EPConfig& config, const ExpertCopyCosts& costs) {
  const std::int64_t near = break_even_rows(config, costs);
  std::string text = concat(
      "Where nothing hides it, a copy pays for its own transfers, forward "
      "and backward, from ",
      format_plural(near, "row"), " on");
  if (config.num_nodes() > 1) {
    text += concat(" inside a node, from ",
                   format_count(break_even_rows(config, costs, {.network = true})), " on another");
  }
  return text + " (--min-rows pays).";
}

bool has_copies(const ExpertCopies& copies) { return copies.busiest_weights > 0; }

}  // namespace

std::vector<std::string> explain_expert_copies(const ExpertCopies& copies,
                                               const ExpertCopyCosts& costs) {
  if (copies.plan.mean_rows == 0) return {"No expert has a row: there is nothing to copy."};
  if (!has_copies(copies)) {
    const std::int64_t fullest = std::ranges::max(copies.rows_before);
    return {hot_sentence(copies),
            concat("No copy is planned: the fullest rank has ", format_plural(fullest, "row"), ", ",
                   detail::times(as_double(fullest) / copies.plan.mean_rows), " the mean.")};
  }
  return {hot_sentence(copies),           even_sentence(copies),
          gemm_sentence(copies, costs),   calls_sentence(copies),
          weight_sentence(copies, costs), hiding_sentence(copies),
          gain_sentence(copies),          break_even_sentence(copies.config, costs)};
}

std::string expert_copies_text(const ExpertCopies& copies, const ExpertCopyCosts& costs,
                               const TextStyle& style) {
  const EvenExperts& plan = copies.plan;
  const std::int32_t homes = copies.config.num_experts_per_rank();
  std::string text = detail::heading(
      concat("Copies of hot experts (", format_plural(plan.slots_per_rank - homes, "spare slot"),
             " per rank)"),
      style);
  text +=
      detail::heading("  expert    home        rows  x even    at home  copies on ranks", style);
  std::vector<HotExpert> hot = hot_experts(copies);
  const auto num_hot = std::ssize(hot);
  hot.resize(std::min<std::int64_t>(num_hot, max_hot_experts));
  for (const HotExpert& expert : hot) {
    text += concat(detail::pad_left(std::to_string(expert.expert), 8),
                   detail::pad_left(std::to_string(expert.home), 8),
                   detail::pad_left(format_count(expert.rows), 12),
                   detail::pad_left(format_fixed(expert.share, 2), 8),
                   detail::pad_left(format_count(expert.at_home), 11), "  ",
                   list_of(expert.ranks, 6), "\n");
  }
  if (num_hot > std::ssize(hot)) {
    text += concat("        ", format_plural(num_hot - std::ssize(hot), "expert"),
                   " with copies not shown\n");
  }
  const std::int64_t max_rows = std::ranges::max(copies.rows_before);
  const auto line_of = [&](std::int32_t r) {
    return concat(detail::pad_left(std::to_string(r), 6), "  ",
                  detail::load_bar(copies.rows_before[r], max_rows, style),
                  detail::pad_left(format_count(copies.rows_before[r]), 11), "  ",
                  detail::load_bar(copies.rows_after[r], max_rows, style),
                  detail::pad_left(format_count(copies.rows_after[r]), 11),
                  detail::pad_left(std::to_string(copies.weights_sent[r]), 7),
                  detail::pad_left(std::to_string(plan.weights_in[r]), 4), "\n");
  };
  const std::int32_t always[] = {copies.busiest};
  return concat(
      text, "\n",
      detail::heading("  rank  rows before              rows after             sends gets", style),
      detail::rank_lines(copies.rows_before, always, line_of, style), "\n",
      detail::meaning("What copies cost and gain", explain_expert_copies(copies, costs), style));
}

namespace {

using detail::svg_number;

using detail::card;
using detail::load_height;
constexpr std::int32_t max_bars = 128;

/// A bar for each rank, or for the fullest of each block of ranks.
std::string panel(std::string_view title, const std::vector<std::int64_t>& rows, std::int64_t scale,
                  double mean) {
  const auto blocks = detail::RankBlocks::make(static_cast<std::int32_t>(rows.size()), max_bars);
  const double step = detail::load_width / blocks.count();
  const auto fullest = std::ranges::max_element(rows);
  const auto height = [&](double value) {
    return scale == 0 ? 0 : load_height * value / as_double(scale);
  };
  std::string text;
  for (std::int32_t block = 0; block < blocks.count(); ++block) {
    const auto first = rows.begin() + blocks.first(block);
    const auto worst = std::max_element(first, rows.begin() + blocks.last(block) + 1);
    const double tall = height(as_double(*worst));
    text += concat("<rect class=\"work", worst == fullest ? " top" : "", "\" x=\"",
                   svg_number(block * step), "\" y=\"", svg_number(load_height - tall),
                   "\" width=\"", svg_number(step > 8 ? step - 2 : step * 0.85), "\" height=\"",
                   svg_number(tall), "\"><title>rank ", worst - rows.begin(), ": ",
                   format_plural(*worst, "row"), "</title></rect>\n");
  }
  const Spread spread{*fullest, mean, static_cast<std::int32_t>(fullest - rows.begin())};
  return detail::load_figure(title, spread, format_count(*fullest), blocks, text, height(mean));
}

std::string loads_section(const ExpertCopies& copies) {
  const std::int64_t scale = std::ranges::max(copies.rows_before);
  std::string text =
      "<section><h2>Rows of each rank</h2>\n<p class=\"note\">Both pictures have one scale; the "
      "dashed line is the mean.";
  if (std::ssize(copies.rows_before) > max_bars) text += " A bar is the fullest rank of its block.";
  return concat(text, "</p>\n<div class=\"loads\">\n",
                panel("Before", copies.rows_before, scale, copies.plan.mean_rows),
                panel("With copies", copies.rows_after, scale, copies.plan.mean_rows),
                "</div></section>\n");
}

std::string hot_section(const ExpertCopies& copies) {
  constexpr std::int64_t max_lines = 256;
  std::string text =
      "<section><h2>Hot experts</h2>\n<div class=\"scroll\"><table><thead><tr><th>expert</th>"
      "<th>home</th><th>rows</th><th>times an even share</th><th>rows at home</th>"
      "<th>copies on ranks</th></tr></thead><tbody>\n";
  const std::vector<HotExpert> hot = hot_experts(copies);
  for (std::int64_t i = 0; i < std::min(std::ssize(hot), max_lines); ++i) {
    text += concat("<tr><th>", hot[i].expert, "</th><td>", hot[i].home, "</td><td>",
                   format_count(hot[i].rows), "</td><td>", format_fixed(hot[i].share, 2),
                   "</td><td>", format_count(hot[i].at_home), "</td><td>",
                   list_of(hot[i].ranks, 16), "</td></tr>\n");
  }
  text += "</tbody></table></div>\n";
  if (std::ssize(hot) > max_lines) {
    text += concat("<p class=\"note\">", format_count(std::ssize(hot) - max_lines),
                   " further experts with copies are not listed.</p>\n");
  }
  return text + "</section>\n";
}

std::string header(const ExpertCopies& copies, const ExpertCopyCosts& costs,
                   const std::string& title) {
  const EvenExperts& plan = copies.plan;
  const auto over_mean = [&](std::int64_t rows) {
    return format_fixed(plan.mean_rows > 0 ? as_double(rows) / plan.mean_rows : 1, 3) + " \u00D7";
  };
  return concat(
      "<header><h1>", detail::html_escape(title), "</h1>\n<p class=\"sub\">",
      format_plural(plan.num_ranks, "rank"), " \u00B7 ",
      format_plural(copies.config.num_experts, "expert"),
      " \u00B7 predicted, nothing was run</p>\n<dl class=\"cards\">\n",
      card("Fullest before", over_mean(std::ranges::max(copies.rows_before)), "over the mean"),
      card("With copies", over_mean(plan.max_rows), "over the mean"),
      card("Copies", format_count(copies.num_copies()),
           format_bytes(copies.weight_bytes) + " each"),
      card("Weights", format_moment(copies.weight_seconds),
           concat(copies.network ? "network" : "NVLink", " at ", speed_text(copies, costs),
                  ", rank ", copies.busiest)),
      card("Forward gains", signed_seconds(copies.forward_gain()), "products less exposed weights"),
      "</dl>\n</header>\n");
}

}  // namespace

std::string expert_copies_report(const ExpertCopies& copies, const ExpertCopyCosts& costs,
                                 const ReportContext& context) {
  return detail::page_of(
      context.title,
      concat(header(copies, costs, context.title),
             detail::meaning_section(explain_expert_copies(copies, costs)), loads_section(copies),
             hot_section(copies), detail::input_section(context)));
}

}  // namespace waybill
