#include "waybill/report/text_summary.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string_view>

#include "figures.h"
#include "waybill/core/error.h"
#include "waybill/report/format.h"

namespace waybill {
namespace {

using detail::at;

constexpr int bar_width = 8;

std::string pad_left(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
}

std::string pad_right(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : text + std::string(width - text.size(), ' ');
}

// A bar of `bar_width` columns; anything above 0 shows.
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
    text += eighths[at(steps)];
    ++columns;
  }
  return text + std::string(at(bar_width - columns), ' ');
}

std::string paint(std::string_view text, std::string_view code, const TextStyle& style) {
  return style.colour ? concat("\x1b[", code, "m", text, "\x1b[0m") : std::string(text);
}

std::string heading(std::string_view text, const TextStyle& style) {
  return paint(text, "1", style) + "\n";
}

std::string line(std::string_view label, const std::string& value) {
  return concat("  ", pad_right(std::string(label), 14), value, "\n");
}

std::string traffic_text(const RankTraffic& traffic, std::int64_t row_bytes) {
  return concat(pad_left(format_count(traffic.rows_in), 13), " rows on the wire (",
                format_bytes(traffic.rows_in * row_bytes), "), ", format_count(traffic.rows_local),
                " stay");
}

std::string plan_block(const PlanSummary& s, const TextStyle& style) {
  std::string text = heading("Plan", style);
  text += line("documents", concat(format_count(s.num_documents), ", the longest ",
                                   format_count(s.longest_document), " tokens, the median ",
                                   format_count(s.median_document)));
  text += line("shards", concat(format_count(s.num_shards), ", at most ",
                                format_count(s.longest_shard), " tokens each"));
  text += line("ranks", concat(format_count(s.world_size), ", ", format_count(s.num_tokens),
                               " tokens, KV stored ", to_string(s.kv_layout)));
  text += line("row sizes", concat("Q ", format_bytes(s.row_bytes.q), ", K and V together ",
                                   format_bytes(s.row_bytes.kv)));
  return text;
}

std::string traffic_block(const PlanSummary& s, const TextStyle& style) {
  const std::int64_t all_pairs = static_cast<std::int64_t>(s.world_size) * (s.world_size - 1);
  std::string text = heading("Traffic forward (backward: the same rows, the other way)", style);
  text += line("Q", traffic_text(s.q, s.row_bytes.q));
  text += line("K and V", traffic_text(s.kv, s.row_bytes.kv));
  text += line("pairs",
               concat(format_count(s.num_wire_pairs), " of ", format_count(all_pairs),
                      " pairs of ranks exchange rows, ", format_bytes(s.wire_bytes), " in all"));
  text += line("imbalance",
               concat("work ", format_fixed(s.rank_work.imbalance(), 3), ", bytes in ",
                      format_fixed(s.rank_bytes_in.imbalance(), 3), ", bytes out ",
                      format_fixed(s.rank_bytes_out.imbalance(), 3), " (largest over mean)"));
  std::string limit =
      concat(format_bytes(s.limit_bytes),
             s.limit_direction == Direction::in ? " into rank " : " out of rank ", s.limit_rank);
  if (style.gb_per_s > 0) {
    limit += concat(", ", format_seconds(s.limit_seconds(style.gb_per_s)), " at ",
                    format_si(style.gb_per_s * 1e9), "B/s");
  }
  text += line("limit", limit);
  return text;
}

// The ranks worth a line: all, or the first, the last and those with the largest figures.
std::vector<std::int32_t> shown_ranks(const PlanSummary& s, int max_lines) {
  std::vector<std::int32_t> all(at(s.world_size));
  std::iota(all.begin(), all.end(), 0);
  const int lines = std::max(max_lines, 8);
  if (s.world_size <= lines) return all;

  std::vector<bool> shown(all.size());
  const int ends = lines / 4;
  for (int i = 0; i < ends; ++i) shown[at(i)] = shown[at(s.world_size - 1 - i)] = true;
  shown[at(s.limit_rank)] = shown[at(s.rank_work.max_rank)] = true;
  std::vector<std::int32_t> worst = all;
  std::stable_sort(worst.begin(), worst.end(), [&](std::int32_t a, std::int32_t b) {
    const RankFigures& left = s.ranks[at(a)];
    const RankFigures& right = s.ranks[at(b)];
    return std::max(left.bytes_in, left.bytes_out) > std::max(right.bytes_in, right.bytes_out);
  });
  auto num_shown = std::count(shown.begin(), shown.end(), true);
  for (std::size_t i = 0; num_shown < lines; ++i) {
    if (shown[at(worst[i])]) continue;
    shown[at(worst[i])] = true;
    ++num_shown;
  }
  std::erase_if(all, [&](std::int32_t rank) { return !shown[at(rank)]; });
  return all;
}

std::string rank_line(const PlanSummary& s, std::int32_t rank, const TextStyle& style) {
  const RankFigures& figures = s.ranks[at(rank)];
  const std::string mark = style.unicode ? " ◀" : " <";
  return concat(pad_left(std::to_string(rank), 6), pad_left(format_count(figures.home_tokens), 11),
                "  ", paint(bar(figures.work, s.rank_work.max, style), "36", style),
                pad_left(format_si(static_cast<double>(figures.work)), 9), "  ",
                paint(bar(figures.bytes_in, s.limit_bytes, style), "32", style),
                pad_left(format_bytes(figures.bytes_in), 9), "  ",
                paint(bar(figures.bytes_out, s.limit_bytes, style), "33", style),
                pad_left(format_bytes(figures.bytes_out), 9),
                rank == s.limit_rank && s.limit_bytes > 0 ? paint(mark, "1", style) : "", "\n");
}

std::string rank_block(const PlanSummary& s, const TextStyle& style) {
  std::string text =
      heading("  rank     tokens  work (q,k pairs)   bytes in           bytes out", style);
  std::int32_t expected = 0;
  const auto skip_to = [&](std::int32_t rank) {
    if (rank == expected) return;
    text += concat(style.unicode ? "     ⋮" : "     :", "       ",
                   format_plural(rank - expected, "rank"), " not shown\n");
  };
  for (const std::int32_t rank : shown_ranks(s, style.max_rank_lines)) {
    skip_to(rank);
    text += rank_line(s, rank, style);
    expected = rank + 1;
  }
  skip_to(s.world_size);
  return text;
}

std::string wrapped(const std::string& sentence, const TextStyle& style) {
  constexpr std::size_t width = 76;
  std::string text = style.unicode ? "  • " : "  - ";
  std::size_t column = 4;
  for (std::size_t begin = 0; begin < sentence.size();) {
    const std::size_t end = std::min(sentence.find(' ', begin), sentence.size());
    if (column + end - begin > width && column > 4) {
      text.back() = '\n';
      text += "    ";
      column = 4;
    }
    text += sentence.substr(begin, end - begin) + ' ';
    column += end - begin + 1;
    begin = end + 1;
  }
  text.back() = '\n';
  return text;
}

}  // namespace

std::string text_summary(const QkvPlan& plan, const QkvRouting& routing, const PlanSummary& summary,
                         const TextStyle& style) {
  std::string text = plan_block(summary, style) + "\n" + traffic_block(summary, style) + "\n" +
                     rank_block(summary, style) + "\n" + heading("What it means", style);
  for (const std::string& sentence : explain(plan, routing, summary, style.gb_per_s))
    text += wrapped(sentence, style);
  return text;
}

}  // namespace waybill
