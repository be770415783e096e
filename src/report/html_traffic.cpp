#include <algorithm>
#include <array>
#include <vector>

#include "figures.h"
#include "html_parts.h"
#include "report/format.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int32_t max_blocks = 128;
constexpr std::int32_t max_blocks_with_tooltips = 64;
constexpr int num_levels = 9;
constexpr double side = 512;  // of the drawn matrix

// Bytes on the wire between blocks of ranks.
struct Heat {
  RankBlocks blocks;
  std::vector<std::int64_t> bytes;  // [n, n]: source, destination
  std::int64_t max = 0;

  [[nodiscard]] std::int64_t value(std::int32_t src, std::int32_t dst) const {
    return bytes[to_size(src) * to_size(blocks.count()) + to_size(dst)];
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
  heat.bytes.resize(to_size(heat.blocks.count()) * to_size(heat.blocks.count()));
  for (const TrafficPair& pair : summary.pairs) {
    const std::int32_t src = pair.src_rank / heat.blocks.ranks_per_block;
    const std::int32_t dst = pair.dst_rank / heat.blocks.ranks_per_block;
    std::int64_t& sum = heat.bytes[to_size(src) * to_size(heat.blocks.count()) + to_size(dst)];
    sum += pair.bytes;
    heat.max = std::max(heat.max, sum);
  }
  return heat;
}

std::string cells_with_tooltips(const Heat& heat) {
  const std::int32_t n = heat.blocks.count();
  const double cell = side / n;
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
  std::string text = concat("<g transform=\"scale(", svg_number(side / n), ")\">\n");
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
  const double cell = side / n;
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
  text += concat("<text class=\"axis\" x=\"", side / 2,
                 "\" y=\"-27\" text-anchor=\"middle\">to rank</text>\n",
                 "<text class=\"axis\" transform=\"translate(", 18 - margin(heat), " ", side / 2,
                 ") rotate(-90)\" text-anchor=\"middle\">from rank</text>\n");
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
                 side + margin(heat) + 4, " ", side + 48,
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

}  // namespace waybill::detail
