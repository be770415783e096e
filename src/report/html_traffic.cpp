#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "html_parts.h"
#include "report/format.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int32_t max_blocks = 128;
constexpr std::int32_t max_blocks_with_tooltips = 64;
constexpr int num_levels = 9;
constexpr double matrix_side = 512;

// Bytes on the wire between blocks of ranks.
struct Heat {
  RankBlocks blocks;
  std::vector<std::int64_t> bytes;  // [n, n]: source, destination
  std::int64_t max = 0;

  [[nodiscard]] std::int64_t value(std::int32_t src, std::int32_t dst) const {
    return bytes[src * blocks.count() + dst];
  }
  // 0: nothing; 1..num_levels in proportion to the bytes.
  [[nodiscard]] int level(std::int32_t src, std::int32_t dst) const {
    const std::int64_t v = value(src, dst);
    if (v == 0) return 0;
    const double share = static_cast<double>(v) / static_cast<double>(max);
    return std::min(num_levels, 1 + static_cast<int>(share * num_levels));
  }
};

Heat make_heat(const PlanSummary& summary) {
  Heat heat{.blocks = RankBlocks::make(summary.world_size, max_blocks), .bytes = {}};
  heat.bytes.resize(std::size_t{1} * heat.blocks.count() * heat.blocks.count());
  for (const TrafficPair& pair : summary.pairs) {
    const std::int32_t src = pair.src_rank / heat.blocks.ranks_per_block;
    const std::int32_t dst = pair.dst_rank / heat.blocks.ranks_per_block;
    std::int64_t& sum = heat.bytes[src * heat.blocks.count() + dst];
    sum += pair.bytes;
    heat.max = std::max(heat.max, sum);
  }
  return heat;
}

std::string cells_with_tooltips(const Heat& heat) {
  const std::int32_t n = heat.blocks.count();
  const double cell = matrix_side / n;
  const std::string size = svg_number(cell - (n <= 32 ? 1.5 : 0.5));
  std::string text;
  for (std::int32_t src = 0; src < n; ++src) {
    for (std::int32_t dst = 0; dst < n; ++dst) {
      const bool home = src == dst && heat.blocks.ranks_per_block == 1;
      text +=
          concat("<rect class=\"", home ? "home" : concat("h", heat.level(src, dst)), "\" x=\"",
                 svg_number(dst * cell), "\" y=\"", svg_number(src * cell), "\" width=\"", size,
                 "\" height=\"", size, "\"><title>", heat.blocks.name(src), " \u2192 ",
                 heat.blocks.name(dst), ": ",
                 home ? "stays, no wire" : format_bytes(heat.value(src, dst)), "</title></rect>\n");
    }
  }
  return text;
}

// One path a level: a tenth of the size of single cells.
std::string cells_as_paths(const Heat& heat) {
  const std::int32_t n = heat.blocks.count();
  std::array<std::string, num_levels + 1> paths;
  for (std::int32_t src = 0; src < n; ++src) {
    for (std::int32_t dst = 0; dst < n;) {
      const int level = heat.level(src, dst);
      std::int32_t end = dst + 1;
      while (end < n && heat.level(src, end) == level) ++end;
      paths[level] += concat("M", dst, " ", src, "h", end - dst, "v1h", dst - end, "z");
      dst = end;
    }
  }
  std::string text = concat("<g transform=\"scale(", svg_number(matrix_side / n), ")\">\n");
  for (std::size_t level = 0; level < paths.size(); ++level) {
    if (!paths[level].empty())
      text += concat("<path class=\"h", level, "\" d=\"", paths[level], "\"/>\n");
  }
  return text + "</g>\n";
}

// Room for the axes, left and above.
double margin(const Heat& heat) {
  return 34 + 10 * static_cast<double>(std::to_string(heat.blocks.world_size - 1).size());
}

std::string axes(const Heat& heat) {
  const std::int32_t n = heat.blocks.count();
  const double cell = matrix_side / n;
  const std::int32_t step = std::max(1, (n + 15) / 16);
  std::string text;
  for (std::int32_t block = 0; block < n; block += step) {
    const std::string middle = svg_number((block + 0.5) * cell);
    const std::int32_t rank = heat.blocks.first(block);
    const bool second = block / step % 2 == 1;  // left out where the page is narrow
    text +=
        concat("<text ", second ? "class=\"second\" " : "", "x=\"", middle,
               "\" y=\"-7\" text-anchor=\"middle\">", rank, "</text>", "<text x=\"-8\" y=\"",
               middle, "\" text-anchor=\"end\" dominant-baseline=\"central\">", rank, "</text>\n");
  }
  text += concat("<text class=\"axis\" x=\"", matrix_side / 2,
                 "\" y=\"-27\" text-anchor=\"middle\">to rank</text>\n",
                 "<text class=\"axis\" transform=\"translate(", 18 - margin(heat), " ",
                 matrix_side / 2, ") rotate(-90)\" text-anchor=\"middle\">from rank</text>\n");
  return text;
}

std::string legend(const Heat& heat) {
  std::string text =
      "<p class=\"legend\"><span>0</span><svg class=\"ramp\" viewBox=\"0 0 10 1\" "
      "preserveAspectRatio=\"none\" aria-hidden=\"true\">";
  for (int level = 0; level <= num_levels; ++level)
    text += concat("<rect class=\"h", level, "\" x=\"", level, "\" width=\"1\" height=\"1\"/>");
  text += concat("</svg><span>", format_bytes(heat.max),
                 heat.blocks.ranks_per_block == 1 ? " between two ranks" : " between two blocks",
                 "</span></p>\n");
  return text;
}

}  // namespace

std::string matrix_section(const PlanSummary& summary) {
  const Heat heat = make_heat(summary);
  const std::int32_t n = heat.blocks.count();
  std::string text =
      "<section class=\"matrix\"><h2>Traffic matrix</h2>\n<p class=\"note\">Bytes of Q, K and V "
      "that each rank sends to each other rank, forward. Backward the matrix is "
      "transposed.";
  if (heat.blocks.ranks_per_block > 1) {
    text += concat(" A cell is a block of ", heat.blocks.ranks_per_block, " by ",
                   heat.blocks.ranks_per_block, " ranks.");
  }
  text += concat("</p>\n<svg class=\"heat\" viewBox=\"-", margin(heat), " -44 ",
                 matrix_side + margin(heat) + 4, " ", matrix_side + 48,
                 "\" role=\"img\" aria-label=\"Heat map of the bytes between ", summary.world_size,
                 " ranks\">\n");
  text += axes(heat);
  text += n <= max_blocks_with_tooltips ? cells_with_tooltips(heat) : cells_as_paths(heat);
  text += "</svg>\n" + legend(heat);
  text += concat("<p class=\"note\">", format_count(summary.num_wire_pairs),
                 " pairs of ranks exchange rows, ", format_bytes(summary.wire_bytes),
                 " in all. Rows that stay on their rank are not counted.</p></section>\n");
  return text;
}

namespace {

/// One figure of all ranks. @param scale value of a bar of full height
std::string panel(std::string_view title, std::string_view css_class, const PlanSummary& summary,
                  std::int64_t RankFigures::*figure, const Spread& spread, std::int64_t scale,
                  std::string (*print)(std::int64_t)) {
  const RankBlocks blocks = RankBlocks::make(summary.world_size, max_blocks);
  const auto height = [&](double value) {
    return scale == 0 ? 0 : load_height * value / static_cast<double>(scale);
  };
  const double step = load_width / blocks.count();
  const double gap = step > 8 ? 2 : step > 3 ? 0.6 : 0.15;
  std::string text;
  for (std::int32_t block = 0; block < blocks.count(); ++block) {
    std::int32_t worst = blocks.first(block);
    for (std::int32_t rank = worst; rank <= blocks.last(block); ++rank) {
      if (summary.ranks[rank].*figure > summary.ranks[worst].*figure) worst = rank;
    }
    const std::int64_t value = summary.ranks[worst].*figure;
    const double tall = height(static_cast<double>(value));
    text += concat("<rect class=\"", css_class, worst == spread.max_rank ? " top" : "", "\" x=\"",
                   svg_number(block * step), "\" y=\"", svg_number(load_height - tall),
                   "\" width=\"", svg_number(step - gap), "\" height=\"", svg_number(tall),
                   "\"><title>rank ", worst, ": ", print(value));
    if (blocks.ranks_per_block > 1) text += concat(", most of ", blocks.name(block));
    text += "</title></rect>\n";
  }
  return load_figure(title, spread, print(spread.max), blocks, text,
                     scale > 0 ? height(spread.mean) : -1);
}

}  // namespace

std::string loads_section(const PlanSummary& summary) {
  std::string text =
      "<section><h2>Load of each rank</h2>\n<p class=\"note\">Work is (query, key) pairs under the "
      "mask. Bytes in and out share one scale; the dashed line is the mean.";
  if (summary.relay_limit)
    text += " Bytes are those of rows sent straight: relay lowers the largest bytes out.";
  if (summary.world_size > max_blocks) text += " A bar is the largest rank of its block.";
  const auto pairs = [](std::int64_t work) { return format_si(static_cast<double>(work)); };
  const std::int64_t limit = summary.limit_bytes;
  return concat(text, "</p>\n<div class=\"loads\">\n",
                panel("Attention work", "work", summary, &RankFigures::work, summary.rank_work,
                      summary.rank_work.max, pairs),
                panel("Bytes in", "in", summary, &RankFigures::bytes_in, summary.rank_bytes_in,
                      limit, format_bytes),
                panel("Bytes out", "out", summary, &RankFigures::bytes_out, summary.rank_bytes_out,
                      limit, format_bytes),
                "</div></section>\n");
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
