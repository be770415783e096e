#include "report/format.h"

#include <array>
#include <cmath>
#include <cstdio>

#include "waybill/core/error.h"

namespace waybill {
namespace {

// Three significant digits for 0 <= value < 10000.
std::string three_digits(double value) {
  const int digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return format_fixed(value, digits);
}

}  // namespace

std::string format_count(std::int64_t count) {
  std::string text = std::to_string(count);
  const std::size_t first = count < 0 ? 1 : 0;
  for (std::size_t place = text.size(); place > first + 3;) {
    place -= 3;
    text.insert(place, 1, ',');
  }
  return text;
}

std::string format_bytes(std::int64_t num_bytes) {
  static constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (num_bytes < 1024) return concat(num_bytes, " B");
  double value = static_cast<double>(num_bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  return three_digits(value) + " " + units[unit];
}

std::string format_si(double value) {
  static constexpr std::array units = {"", " k", " M", " G", " T", " P", " E"};
  if (value < 0) return concat("-", format_si(-value));
  if (value < 999.5) return format_fixed(value, value == std::floor(value) ? 0 : 2);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  return three_digits(value) + units[unit];
}

std::string format_seconds(double seconds) {
  static constexpr std::array units = {"ns", "us", "ms", "s"};
  double value = seconds * 1e9;
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  return three_digits(value) + " " + units[unit];
}

std::string format_fixed(double value, int digits) {
  std::array<char, 400> text{};
  const int length = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return {text.data(), static_cast<std::size_t>(length)};
}

std::string format_plural(std::int64_t count, std::string_view noun) {
  return concat(format_count(count), " ", noun, count == 1 ? "" : "s");
}

}  // namespace waybill
