#include "html_parts.h"

#include <array>
#include <cmath>

#include "core/printable.h"
#include "figures.h"
#include "report/format.h"
#include "waybill/core/error.h"

namespace waybill::detail {
std::string html_escape(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto [code_point, length] = first_code_point(text);
    const char lead = text.front();
    if (length == 0 || (is_control(code_point) && lead != '\n' && lead != '\t')) {
      result += "\uFFFD";
    } else if (lead == '&') {
      result += "&amp;";
    } else if (lead == '<') {
      result += "&lt;";
    } else if (lead == '>') {
      result += "&gt;";
    } else if (lead == '"') {
      result += "&quot;";
    } else if (lead == '\'') {
      result += "&#39;";
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

std::string svg_number(double value) {
  std::string text = format_fixed(value, 2);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

RankBlocks RankBlocks::make(std::int32_t world_size, std::int32_t max_blocks) {
  return {.world_size = world_size, .ranks_per_block = (world_size + max_blocks - 1) / max_blocks};
}

std::string RankBlocks::name(std::int32_t block) const {
  if (first(block) == last(block)) return concat("rank ", first(block));
  return concat("ranks ", first(block), "\u2013", last(block));
}

std::string rank_colour(std::int32_t rank, std::int32_t world_size) {
  // Neighbours that share a document are often next to each other: they differ in lightness too.
  const std::int32_t hue = static_cast<std::int32_t>((rank * std::int64_t{360}) / world_size);
  static constexpr std::array<std::int32_t, 3> lightness = {46, 60, 38};
  const std::int32_t light = world_size <= 12 ? (rank % 2 == 0 ? 46 : 60) : lightness[rank % 3];
  return concat("hsl(", (hue + 172) % 360, " 52% ", light, "%)");
}

}  // namespace waybill::detail
