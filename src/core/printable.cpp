#include "core/printable.h"

#include <algorithm>
#include <system_error>

namespace waybill {
namespace detail {

CodePoint first_code_point(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t length = lead >= 0xC2 && lead < 0xE0   ? 2
                             : lead >= 0xE0 && lead < 0xF0 ? 3
                             : lead >= 0xF0 && lead < 0xF5 ? 4
                                                           : 0;
  if (length == 0 || length > text.size()) return {};
  std::uint32_t value = lead & (0x7FU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return {};
    value = value << 6U | (byte(i) & 0x3FU);
  }
  const bool overlong = (length == 3 && value < 0x800) || (length == 4 && value < 0x10000);
  const bool surrogate = 0xD800 <= value && value <= 0xDFFF;
  return overlong || surrogate || value > 0x10FFFF ? CodePoint{} : CodePoint{value, length};
}

bool is_control(std::uint32_t c) {
  return c < 0x20 || (0x7F <= c && c <= 0x9F) || c == 0x61C || c == 0x200E || c == 0x200F ||
         (0x2028 <= c && c <= 0x202E) || (0x2066 <= c && c <= 0x2069);
}

}  // namespace detail

namespace {

void append_hex(std::string& text, std::uint32_t value, int digits) {
  constexpr std::string_view hex = "0123456789abcdef";
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4)
    text += hex[value >> static_cast<unsigned>(shift) & 15U];
}

std::string escaped(std::string_view text, std::string_view kept) {
  const bool plain =
      std::all_of(text.begin(), text.end(), [](char c) { return ' ' <= c && c < 0x7F; });
  if (plain) return std::string(text);
  std::string result;
  while (!text.empty()) {
    const detail::CodePoint c = detail::first_code_point(text);
    const std::size_t num_bytes = std::max<std::size_t>(1, c.num_bytes);
    if (c.num_bytes == 0 || (c.value < 0x80 && detail::is_control(c.value))) {
      if (c.num_bytes == 1 && kept.find(text[0]) != std::string_view::npos) {
        result += text[0];
      } else {
        result += "\\x";
        append_hex(result, static_cast<unsigned char>(text[0]), 2);
      }
    } else if (detail::is_control(c.value)) {
      result += "\\u";
      append_hex(result, c.value, 4);
    } else {
      result += text.substr(0, num_bytes);
    }
    text.remove_prefix(num_bytes);
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text) { return escaped(text, "\n\t"); }

std::string printable_line(std::string_view text) { return escaped(text, ""); }

}  // namespace waybill

namespace waybill::detail {

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace waybill::detail
