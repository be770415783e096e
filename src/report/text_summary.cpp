#include "waybill/report/text_summary.h"

#include <algorithm>

#include "figures.h"
#include "report/format.h"
#include "text_parts.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using detail::bar;
using detail::heading;
using detail::labelled;
using detail::pad_left;
using detail::paint;

std::string traffic_text(const RankTraffic& traffic, std::int64_t row_bytes) {
  return concat(pad_left(format_count(traffic.rows_in), 13), " rows on the wire (",
                format_bytes(traffic.rows_in * row_bytes), "), ", format_count(traffic.rows_local),
                " stay");
}

std::string plan_block(const PlanSummary& s, const TextStyle& style) {
  std::string text = heading("Plan", style);
  text += labelled("documents", concat(format_count(s.num_documents), ", the longest ",
                                       format_count(s.longest_document), " tokens, the median ",
                                       format_count(s.median_document)));
  text += labelled("shards", concat(format_count(s.num_shards), ", at most ",
                                    format_count(s.longest_shard), " tokens each"));
  text += labelled("ranks", concat(format_count(s.world_size), ", ", format_count(s.num_tokens),
                                   " tokens, KV stored ", to_string(s.kv_layout)));
  text += labelled("row sizes", concat("Q ", format_bytes(s.row_bytes.q), ", K and V together ",
                                       format_bytes(s.row_bytes.kv)));
  return text;
}

std::string traffic_block(const PlanSummary& s, const TextStyle& style) {
  const std::int64_t all_pairs = static_cast<std::int64_t>(s.world_size) * (s.world_size - 1);
  std::string text =
      heading(s.relay_limit ? "Traffic forward, sent directly (backward: the same, the other way)"
                            : "Traffic forward (backward: the same rows, the other way)",
              style);
  text += labelled("Q", traffic_text(s.q, s.row_bytes.q));
  text += labelled("K and V", traffic_text(s.kv, s.row_bytes.kv));
  text += labelled(
      "pairs", concat(format_count(s.num_wire_pairs), " of ", format_count(all_pairs),
                      " pairs of ranks exchange rows, ", format_bytes(s.wire_bytes), " in all"));
  text += labelled("imbalance",
                   concat("work ", format_fixed(s.rank_work.imbalance(), 3), ", bytes in ",
                          format_fixed(s.rank_bytes_in.imbalance(), 3), ", bytes out ",
                          format_fixed(s.rank_bytes_out.imbalance(), 3), " (largest over mean)"));
  const auto limit_text = [](std::int64_t bytes, Direction direction, std::int32_t rank) {
    return concat(format_bytes(bytes), direction == Direction::in ? " into rank " : " out of rank ",
                  rank);
  };
  const RankLimit taken = s.taken_limit();
  std::string limit = limit_text(taken.bytes, taken.direction, taken.rank);
  if (s.relay_limit) limit += " with relay";
  if (style.gb_per_s > 0) {
    limit += concat(", ", format_seconds(s.limit_seconds(style.gb_per_s)), " at ",
                    format_si(style.gb_per_s * 1e9), "B/s");
  }
  if (s.relay_limit)
    limit += concat("; ", limit_text(s.limit_bytes, s.limit_direction, s.limit_rank), " without");
  text += labelled("limit", limit);
  return text;
}

std::string rank_line(const PlanSummary& s, std::int32_t rank, const TextStyle& style) {
  const RankFigures& figures = s.ranks[rank];
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
  std::vector<std::int64_t> bytes;
  for (const RankFigures& rank : s.ranks) bytes.push_back(std::max(rank.bytes_in, rank.bytes_out));
  const std::int32_t always[] = {s.limit_rank, s.rank_work.max_rank};
  const auto shown = detail::shown_ranks(bytes, always, style.max_rank_lines);
  return heading("  rank     tokens  work (q,k pairs)   bytes in           bytes out", style) +
         detail::rank_lines(
             shown, s.world_size, [&](std::int32_t rank) { return rank_line(s, rank, style); },
             style);
}

}  // namespace

std::string text_summary(const QkvPlan& plan, const QkvRouting& routing, const PlanSummary& summary,
                         const TextStyle& style) {
  detail::check_speed(style.gb_per_s, "text_summary");
  std::string text = plan_block(summary, style) + "\n" + traffic_block(summary, style) + "\n" +
                     rank_block(summary, style) + "\n" + heading("What it means", style);
  for (const std::string& sentence : explain(plan, routing, summary, style.gb_per_s))
    text += detail::wrapped(sentence, style);
  return text;
}

}  // namespace waybill
