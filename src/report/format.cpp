#include "report/format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <sstream>

#include "waybill/core/error.h"

namespace waybill {
namespace {

/// Three significant digits of a number >= 0, in the first unit in which it is below 999.5.
std::string scaled(double value, double step, std::initializer_list<const char*> units) {
  const char* const* unit = units.begin();
  for (; value >= 999.5 && unit + 1 < units.end(); ++unit) value /= step;
  return format_fixed(value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0) + *unit;
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
  if (num_bytes < 1024) return concat(num_bytes, " B");
  return scaled(static_cast<double>(num_bytes), 1024,
                {" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"});
}

std::string format_si(double value) {
  if (value < 0) return concat("-", format_si(-value));
  if (value < 999.5) return format_fixed(value, value == std::floor(value) ? 0 : 2);
  return scaled(value, 1000, {"", " k", " M", " G", " T", " P", " E"});
}

std::string format_seconds(double seconds) {
  return scaled(seconds * 1e9, 1000, {" ns", " us", " ms", " s"});
}

std::string format_moment(double seconds) { return seconds > 0 ? format_seconds(seconds) : "0"; }

std::string format_fixed(double value, int digits) {
  std::array<char, 400> text{};
  const int length = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return {text.data(), static_cast<std::size_t>(length)};
}

std::string format_plural(std::int64_t count, std::string_view noun) {
  return concat(format_count(count), " ", noun, count == 1 ? "" : "s");
}

}  // namespace waybill

namespace waybill::detail {
namespace {

constexpr int bar_width = 8;

/// A bar of 8 columns; anything above 0 shows.
std::string bar(std::int64_t value, std::int64_t max, const TextStyle& style) {
  static constexpr std::array<std::string_view, 9> eighths = {"",  "▏", "▎", "▍", "▌",
                                                              "▋", "▊", "▉", "█"};
  const double share = max > 0 ? static_cast<double>(value) / static_cast<double>(max) : 0;
  const int steps_per_column = style.unicode ? 8 : 1;
  int steps = static_cast<int>(std::lround(share * bar_width * steps_per_column));
  if (value > 0) steps = std::max(steps, 1);
  std::string text;
  int columns = 0;
  for (; steps >= steps_per_column; steps -= steps_per_column, ++columns)
    text += style.unicode ? eighths[8] : "#";
  if (steps > 0) {
    text += eighths[steps];
    ++columns;
  }
  return text + std::string(bar_width - columns, ' ');
}

/// `text` in the colour of an ANSI code, where the style has colours.
std::string paint(std::string_view text, std::string_view code, const TextStyle& style) {
  return style.colour ? concat("\x1b[", code, "m", text, "\x1b[0m") : std::string(text);
}

}  // namespace

std::string pad_left(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
}

std::string pad_right(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : text + std::string(width - text.size(), ' ');
}

std::string times(double factor) { return format_fixed(factor, factor < 1.1 ? 3 : 2) + " times"; }

std::string rate(double bytes_per_second) { return format_si(bytes_per_second) + "B/s"; }

double speed_of(const LinkSpeeds& speeds, bool network) {
  return network ? speeds.network_bytes_per_second : speeds.nvlink_bytes_per_second;
}

std::string heading(std::string_view text, const TextStyle& style) {
  return paint(text, "1", style) + "\n";
}

std::string labelled(std::string_view label, const std::string& value) {
  return concat("  ", pad_right(std::string(label), 14), value, "\n");
}

std::string wrapped(const std::string& text, std::size_t width, const std::string& indentation) {
  std::string result;
  std::size_t column = 0;
  std::istringstream words(text);
  for (std::string word; words >> word; result += word) {
    const bool fits = column + 1 + word.size() <= width;
    if (!result.empty()) result += fits ? " " : "\n" + indentation;
    column = word.size() + (fits && column > 0 ? column + 1 : 0);
  }
  return result;
}

std::string wrapped(const std::string& sentence, const TextStyle& style) {
  const auto width = static_cast<std::size_t>(std::max(style.width, 30) - 8);
  return concat(style.unicode ? "  • " : "  - ", wrapped(sentence, width, "    "), "\n");
}

std::string meaning(std::string_view title, const std::vector<std::string>& sentences,
                    const TextStyle& style) {
  std::string text = heading(title, style);
  for (const std::string& sentence : sentences) text += wrapped(sentence, style);
  return text;
}

std::string load_bar(std::int64_t value, std::int64_t max, const TextStyle& style) {
  return paint(bar(value, max, style), "36", style);
}

std::string rank_line(std::int32_t rank, std::int64_t tokens,
                      std::pair<std::int64_t, std::int64_t> work, const std::string& work_text,
                      std::int64_t bytes_in, std::int64_t bytes_out, std::int64_t max_bytes,
                      bool marked, const TextStyle& style) {
  return concat(pad_left(std::to_string(rank), 6), pad_left(format_count(tokens), 11), "  ",
                load_bar(work.first, work.second, style), pad_left(work_text, 9), "  ",
                paint(bar(bytes_in, max_bytes, style), "32", style),
                pad_left(format_bytes(bytes_in), 9), "  ",
                paint(bar(bytes_out, max_bytes, style), "33", style),
                pad_left(format_bytes(bytes_out), 9),
                marked ? paint(style.unicode ? " ◀" : " <", "1", style) : "", "\n");
}

std::string rank_lines(std::span<const std::int64_t> weights, std::span<const std::int32_t> always,
                       const std::function<std::string(std::int32_t)>& line_of,
                       const TextStyle& style) {
  const auto world_size = static_cast<std::int32_t>(weights.size());
  const int lines = std::max(style.max_rank_lines, 8);
  std::vector<bool> shown(weights.size(), world_size <= lines);
  for (int i = 0; i < std::min(world_size, lines / 4); ++i)
    shown[i] = shown[world_size - 1 - i] = true;
  for (const std::int32_t rank : always) shown[rank] = true;
  std::vector<std::int32_t> worst(weights.size());
  std::iota(worst.begin(), worst.end(), 0);
  std::ranges::stable_sort(worst, std::ranges::greater(),
                           [&](std::int32_t rank) { return weights[rank]; });
  auto num_shown = std::ranges::count(shown, true);
  for (auto rank = worst.begin(); num_shown < std::min(world_size, lines); ++rank) {
    if (!shown[*rank]) ++num_shown;
    shown[*rank] = true;
  }
  std::string text;
  std::int32_t num_hidden = 0;  // before this rank
  for (std::int32_t rank = 0; rank <= world_size; ++rank) {
    if (rank < world_size && !shown[rank]) {
      ++num_hidden;
      continue;
    }
    if (num_hidden > 0)
      text += concat(style.unicode ? "     ⋮" : "     :", "       ",
                     format_plural(num_hidden, "rank"), " not shown\n");
    if (rank < world_size) text += line_of(rank);
    num_hidden = 0;
  }
  return text;
}

}  // namespace waybill::detail
