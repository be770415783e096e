#include <algorithm>
#include <string_view>

#include "html_parts.h"
#include "report/format.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int32_t max_lines = 64;
constexpr double width = 960;
constexpr double label_width = 74;

// The rank of a block that ends last.
std::int32_t last_of_block(const StepPrediction& step, const RankBlocks& blocks,
                           std::int32_t block) {
  const std::vector<double>& ends = step.phases.back().end;
  const auto first = ends.begin() + blocks.first(block);
  const auto last = ends.begin() + blocks.last(block) + 1;
  return static_cast<std::int32_t>(std::max_element(first, last) - ends.begin());
}

std::string phase_rect(const PhasePrediction& phase, std::int32_t rank, double scale, double y,
                       double height) {
  const double begin = phase.begin[rank];
  const double end = phase.end[rank];
  if (end <= begin) return "";
  const std::int32_t other = phase.waits_for[rank];
  return concat("<rect class=\"p", static_cast<int>(phase.phase), "\" x=\"",
                svg_number(begin * scale), "\" y=\"", svg_number(y), "\" width=\"",
                svg_number((end - begin) * scale), "\" height=\"", svg_number(height),
                "\"><title>rank ", rank, ", ", to_string(phase.phase), ": ",
                format_seconds(end - begin), " from ", format_moment(begin),
                other == rank ? "" : concat(", waits for rank ", other), "</title></rect>");
}

std::string legend() {
  std::string text = "<p class=\"chips\">";
  for (int i = 0; i < num_step_phases; ++i) {
    text += concat(
        "<span class=\"key\"><svg class=\"chip time\" viewBox=\"0 0 30 18\"><rect class=\"p", i,
        "\" width=\"30\" height=\"18\"/></svg>", to_string(static_cast<StepPhase>(i)), "</span> ");
  }
  return text + "</p>\n";
}

std::string timeline(const NamedStep& named, double longest) {
  const StepPrediction& step = named.step;
  const RankBlocks blocks = RankBlocks::make(step.world_size, max_lines);
  const double line = blocks.count() <= 16 ? 26 : 10;
  const double scale = longest > 0 ? width / longest : 0;
  const double height = line * blocks.count();
  std::string text =
      concat("<figure><figcaption><b>", html_escape(named.name), ": ", format_seconds(step.seconds),
             "</b> forward ", format_seconds(step.forward_seconds), ". ",
             html_escape(explain_step(step)[1]), "</figcaption>\n<svg class=\"time\" viewBox=\"",
             svg_number(-label_width), " -8 ", svg_number(width + label_width + 2), " ",
             svg_number(height + 44), "\" role=\"img\" aria-label=\"Timeline, ",
             html_escape(named.name), "\">\n");
  // Texts grow where the page is narrow, and every second one is left out.
  const std::int32_t stride = line > 12 ? 1 : 4;
  for (std::int32_t block = 0; block < blocks.count(); ++block) {
    const std::int32_t rank = last_of_block(step, blocks, block);
    const double y = block * line;
    if (block % stride == 0) {
      const bool second = stride == 1 && block % 2 == 1;
      text += concat("<text ", second ? "class=\"second\" " : "", "x=\"-6\" y=\"",
                     svg_number(y + line * 0.5),
                     "\" text-anchor=\"end\" dominant-baseline=\"central\">", rank, "</text>");
    }
    for (const PhasePrediction& phase : step.phases)
      text += phase_rect(phase, rank, scale, y, line - 1);
    text += "\n";
  }
  text +=
      concat("<text x=\"-6\" y=\"", svg_number(height + 28), "\" text-anchor=\"end\">rank</text>");
  for (int i = 0; i <= 4; ++i) {
    text += concat("<text x=\"", svg_number(width * i / 4), "\" y=\"", svg_number(height + 28),
                   "\" text-anchor=\"",
                   i == 0   ? "start"
                   : i == 4 ? "end"
                            : "middle",
                   "\">", format_moment(longest * i / 4), "</text>");
  }
  return text + "\n</svg></figure>\n";
}

/// The columns of step_table, and what their names mean.
std::string figures(const std::vector<NamedStep>& steps) {
  std::string text = "<div class=\"scroll\"><table><thead><tr><th></th>";
  for (const NamedStep& step : steps) text += concat("<th>", html_escape(step.name), "</th>");
  text += "</tr></thead><tbody>\n";
  for (const auto& [label, cells] : step_figures(steps)) {
    text += concat("<tr><th>", html_escape(label), "</th>");
    for (const std::string& cell : cells) text += concat("<td>", html_escape(cell), "</td>");
    text += "</tr>\n";
  }
  text += "</tbody></table></div>\n<dl class=\"facts\">\n";
  for (const NamedStep& step : steps) {
    const std::string_view meaning = meaning_of_step(step.name);
    if (meaning.empty()) continue;
    text += concat("<dt>", html_escape(step.name), "</dt><dd>", html_escape(meaning), "</dd>\n");
  }
  return text +
         "<dt>phases</dt><dd>the time for which the last rank waited</dd>\n<dt>bytes</dt><dd>of "
         "the first dispatch, into and out of a rank</dd></dl>\n";
}

}  // namespace

std::string timeline_section(const std::vector<NamedStep>& steps) {
  if (steps.empty()) return "";
  double longest = 0;
  bool blocks = false;
  for (const NamedStep& named : steps) {
    longest = std::max(longest, named.step.seconds);
    blocks = blocks || named.step.world_size > max_lines;
  }
  std::string text =
      "<section><h2>Predicted timeline</h2>\n<p class=\"note\">One attention layer, forward and "
      "backward, by the cost model; nothing was measured. Timelines are on one scale.";
  if (blocks) text += " A line is the rank of its block that ends last.";
  if (std::ranges::find(steps, "planner", &NamedStep::name) != steps.end())
    text +=
        " Column \"planner\" is ContextParallelAttention's own plan, with what its ranks forward. "
        "Loads, traffic and tables of this page are of the plan that waybill plan makes, which has "
        "other shards.";
  text += "</p>\n" + figures(steps) + legend();
  for (const NamedStep& named : steps) text += timeline(named, longest);
  return text + "</section>\n";
}

}  // namespace waybill::detail
