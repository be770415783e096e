#include "html_parts.h"

#include <array>
#include <cmath>

#include "figures.h"
#include "waybill/core/error.h"
#include "waybill/report/format.h"

namespace waybill::detail {
namespace {

// Bytes of the UTF-8 sequence at the front of `text`; 0 when there is none.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const std::size_t length = lead < 0x80                   ? 1
                             : lead >= 0xC2 && lead < 0xE0 ? 2
                             : lead >= 0xE0 && lead < 0xF0 ? 3
                             : lead >= 0xF0 && lead < 0xF5 ? 4
                                                           : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  if (length == 1) return 1;
  const unsigned char second = byte(1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool outside = (lead == 0xED && second >= 0xA0) || (lead == 0xF4 && second >= 0x90);
  return overlong || outside ? 0 : length;
}

}  // namespace

std::string html_escape(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const auto lead = static_cast<unsigned char>(text.front());
    if (length == 0 || lead == 0x7F || (lead < 0x20 && lead != '\n' && lead != '\t')) {
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
  const std::int32_t light = world_size <= 12 ? (rank % 2 == 0 ? 46 : 60) : lightness[at(rank % 3)];
  return concat("hsl(", (hue + 172) % 360, " 52% ", light, "%)");
}

}  // namespace waybill::detail
