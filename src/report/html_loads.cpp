#include <algorithm>
#include <string_view>

#include "figures.h"
#include "html_parts.h"
#include "report/format.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int32_t max_blocks = 128;
constexpr double width = 340;
constexpr double height = 120;

// One figure of all ranks: how it is named, coloured, printed and scaled.
struct Panel {
  std::string_view title;
  std::string_view css_class;
  std::int64_t RankFigures::*figure;
  const Spread& spread;
  std::int64_t scale;  // value of a bar of full height
  std::string (*print)(std::int64_t);
};

std::string print_work(std::int64_t pairs) { return format_si(static_cast<double>(pairs)); }

std::string bars(const PlanSummary& summary, const Panel& panel) {
  const RankBlocks blocks = RankBlocks::make(summary.world_size, max_blocks);
  const double step = width / blocks.count();
  const double gap = step > 8 ? 2 : step > 3 ? 0.6 : 0.15;
  std::string text;
  for (std::int32_t block = 0; block < blocks.count(); ++block) {
    std::int32_t worst = blocks.first(block);
    for (std::int32_t rank = worst; rank <= blocks.last(block); ++rank) {
      if (summary.ranks[rank].*panel.figure > summary.ranks[worst].*panel.figure) worst = rank;
    }
    const std::int64_t value = summary.ranks[worst].*panel.figure;
    const double tall =
        panel.scale == 0 ? 0
                         : height * static_cast<double>(value) / static_cast<double>(panel.scale);
    text += concat("<rect class=\"", panel.css_class, worst == panel.spread.max_rank ? " top" : "",
                   "\" x=\"", svg_number(block * step), "\" y=\"", svg_number(height - tall),
                   "\" width=\"", svg_number(step - gap), "\" height=\"", svg_number(tall),
                   "\"><title>rank ", worst, ": ", panel.print(value));
    if (blocks.ranks_per_block > 1) text += concat(", most of ", blocks.name(block));
    text += "</title></rect>\n";
  }
  return text;
}

std::string axis(const PlanSummary& summary) {
  const RankBlocks blocks = RankBlocks::make(summary.world_size, max_blocks);
  const double step = width / blocks.count();
  const std::int32_t stride = std::max(1, (blocks.count() + 7) / 8);
  std::string text;
  for (std::int32_t block = 0; block < blocks.count(); block += stride) {
    text += concat("<text x=\"", svg_number((block + 0.5) * step), "\" y=\"", height + 15,
                   "\" text-anchor=\"middle\">", blocks.first(block), "</text>");
  }
  return text + "\n";
}

std::string panel_figure(const PlanSummary& summary, const Panel& panel) {
  std::string text =
      concat("<figure><figcaption><b>", panel.title, "</b> most: rank ", panel.spread.max_rank,
             ", ", panel.print(panel.spread.max), ", ", format_fixed(panel.spread.imbalance(), 3),
             " \u00D7 the mean</figcaption>\n<svg class=\"load\" viewBox=\"-6 -4 ", width + 12, " ",
             height + 24, "\" role=\"img\" aria-label=\"", panel.title, " by rank\">\n");
  text += bars(summary, panel);
  if (panel.scale > 0) {
    const std::string mean =
        svg_number(height - height * panel.spread.mean / static_cast<double>(panel.scale));
    text += concat("<line class=\"mean\" x1=\"-4\" x2=\"", width + 4, "\" y1=\"", mean, "\" y2=\"",
                   mean, "\"/>\n");
  }
  text += concat("<line class=\"base\" x1=\"-4\" x2=\"", width + 4, "\" y1=\"", height, "\" y2=\"",
                 height, "\"/>\n", axis(summary), "</svg></figure>\n");
  return text;
}

}  // namespace

std::string loads_section(const PlanSummary& summary) {
  const Panel panels[] = {
      {"Attention work", "work", &RankFigures::work, summary.rank_work, summary.rank_work.max,
       print_work},
      {"Bytes in", "in", &RankFigures::bytes_in, summary.rank_bytes_in, summary.limit_bytes,
       format_bytes},
      {"Bytes out", "out", &RankFigures::bytes_out, summary.rank_bytes_out, summary.limit_bytes,
       format_bytes},
  };
  std::string text =
      "<section><h2>Load of each rank</h2>\n<p class=\"note\">Work is (query, key) pairs under the "
      "mask. Bytes in and out share one scale; the dashed line is the mean.";
  if (summary.world_size > max_blocks) text += " A bar is the largest rank of its block.";
  text += "</p>\n<div class=\"loads\">\n";
  for (const Panel& panel : panels) text += panel_figure(summary, panel);
  return text + "</div></section>\n";
}

std::string table_section(const PlanSummary& summary) {
  constexpr std::int32_t max_rows = 1024;
  std::string text =
      "<section><details><summary>All ranks as a table</summary>\n<div class=\"scroll\"><table>"
      "<thead><tr><th>rank</th><th>home tokens</th><th>shards home</th><th>shards attended</th>"
      "<th>work</th><th>Q rows in</th><th>Q rows out</th><th>Q rows stay</th><th>KV rows in</th>"
      "<th>KV rows out</th><th>KV rows stay</th><th>bytes in</th><th>bytes out</th>"
      "<th>buffers</th></tr></thead><tbody>\n";
  for (std::int32_t rank = 0; rank < std::min(summary.world_size, max_rows); ++rank) {
    const RankFigures& r = summary.ranks[rank];
    text += concat("<tr><th>", rank, "</th>");
    for (const std::int64_t count :
         {r.home_tokens, r.home_shards, r.attended_shards, r.work, r.q.rows_in, r.q.rows_out,
          r.q.rows_local, r.kv.rows_in, r.kv.rows_out, r.kv.rows_local})
      text += concat("<td>", format_count(count), "</td>");
    for (const std::int64_t num_bytes : {r.bytes_in, r.bytes_out, r.buffer_bytes})
      text += concat("<td>", format_bytes(num_bytes), "</td>");
    text += "</tr>\n";
  }
  text += "</tbody></table></div>\n";
  if (summary.world_size > max_rows) {
    text += concat("<p class=\"note\">", format_count(summary.world_size - max_rows),
                   " further ranks are not listed.</p>\n");
  }
  return text + "</details></section>\n";
}

}  // namespace waybill::detail
