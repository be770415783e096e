#include <algorithm>

#include "core/checks.h"
#include "report/format.h"
#include "report/plan_figures.h"
#include "waybill/core/error.h"
#include "waybill/report/plan_summary.h"

namespace waybill {
namespace {

using detail::times;

std::string percent(std::int64_t part, std::int64_t whole) {
  if (part == whole) return "all";
  const double share = 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  return format_fixed(std::min(share, 99.0), 0) + "%";
}

std::string limit_sentence(const PlanSummary& summary, double gb_per_s) {
  const RankLimit limit = summary.taken_limit();
  const bool in = limit.direction == Direction::in;
  const Spread& spread = in ? summary.rank_bytes_in : summary.rank_bytes_out;
  const bool relayed = summary.relay_limit.has_value();
  std::string text =
      concat(relayed ? "With relay, rank " : "Rank ", limit.rank, " sets the limit: it ",
             in ? "receives " : "sends ", format_bytes(limit.bytes));
  if (!relayed) text += concat(", ", times(spread.imbalance()), " the mean");
  if (gb_per_s > 0) {
    text +=
        concat("; at ", format_si(gb_per_s * 1e9), "B/s each way, no dispatch can be faster than ",
               format_seconds(summary.limit_seconds(gb_per_s)));
  }
  return text + ".";
}

// The limit if receivers did not forward rows to each other.
std::string direct_sentence(const PlanSummary& summary) {
  const bool in = summary.limit_direction == Direction::in;
  return concat("Receivers forward K and V to each other. Without that, rank ", summary.limit_rank,
                " would ", in ? "receive " : "send ", format_bytes(summary.limit_bytes), ".");
}

std::string cause_sentence(const QkvPlan& plan, const QkvRouting& routing,
                           const PlanSummary& summary) {
  const DocumentBytes cause =
      document_bytes(plan, routing, summary.row_bytes, summary.limit_rank, summary.limit_direction)
          .front();
  const DocumentFigures document = document_figures(plan)[cause.document];
  return concat("Document ", cause.document, " (", format_plural(document.tokens, "token"), " in ",
                format_plural(document.num_shards, "shard"), ", attended on ",
                format_plural(document.num_attending_ranks, "rank"), ") causes ",
                percent(cause.bytes(), summary.limit_bytes),
                " of these bytes: ", format_bytes(cause.q_bytes), " of Q and ",
                format_bytes(cause.kv_bytes), " of K and V.");
}

std::string work_sentence(const PlanSummary& summary) {
  const Spread& work = summary.rank_work;
  const auto idle = std::count_if(summary.ranks.begin(), summary.ranks.end(),
                                  [](const RankFigures& rank) { return rank.work == 0; });
  std::string text =
      concat(work.imbalance() <= 1.05 ? "Attention work is even" : "Attention work is uneven",
             ": rank ", work.max_rank, " has the most, ", times(work.imbalance()), " the mean of ",
             format_si(work.mean), " (query, key) pairs");
  if (idle > 0)
    text += concat("; ", format_plural(idle, "rank"), idle == 1 ? " has" : " have", " none");
  return text + ".";
}

std::string copies_sentence(const PlanSummary& summary) {
  return concat("A row of K and V is stored ", format_fixed(summary.kv_copies, 2),
                " times on average: ",
                summary.kv_layout == KvLayout::per_rank
                    ? "once on every rank where queries need it."
                    : "once for every query shard that needs it, even on the same rank.");
}

// One long document feeds many ranks: then what one rank sends limits all.
void add_relay_sentence(const PlanSummary& summary, std::vector<std::string>& sentences) {
  const std::int64_t out = summary.rank_bytes_out.max;
  const std::int64_t in = summary.rank_bytes_in.max;
  if (in == 0 || out < 2 * in) return;
  sentences.push_back(concat(
      "That is ", format_fixed(static_cast<double>(out) / static_cast<double>(in), 1),
      " times what any rank receives: if the receivers forwarded rows to each other, the limit "
      "could fall towards ",
      format_bytes(in), "."));
}

}  // namespace

std::vector<std::string> explain(const QkvPlan& plan, const QkvRouting& routing,
                                 const PlanSummary& summary, double gb_per_s) {
  detail::check_belongs(plan, routing, summary.row_bytes, "explain");
  detail::check_not_negative("explain", "gb_per_s", gb_per_s);
  if (summary.num_tokens == 0) return {"The plan has no tokens: nothing moves."};
  std::vector<std::string> sentences;
  if (summary.limit_bytes == 0) {
    sentences.emplace_back(
        "Nothing crosses the wire: every row stays on its rank or has no bytes.");
  } else {
    sentences.push_back(limit_sentence(summary, gb_per_s));
    if (summary.relay_limit) sentences.push_back(direct_sentence(summary));
    sentences.push_back(cause_sentence(plan, routing, summary));
    if (!summary.relay_limit) add_relay_sentence(summary, sentences);
  }
  sentences.push_back(work_sentence(summary));
  sentences.push_back(copies_sentence(summary));
  return sentences;
}

namespace {

using detail::heading;
using detail::labelled;
using detail::pad_left;

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

std::string rank_block(const PlanSummary& s, const TextStyle& style) {
  std::vector<std::int64_t> bytes;
  for (const RankFigures& rank : s.ranks) bytes.push_back(std::max(rank.bytes_in, rank.bytes_out));
  const std::int32_t always[] = {s.limit_rank, s.rank_work.max_rank};
  return heading("  rank     tokens  work (q,k pairs)   bytes in           bytes out", style) +
         detail::rank_lines(
             bytes, always,
             [&](std::int32_t rank) {
               const RankFigures& r = s.ranks[rank];
               return detail::rank_line(rank, r.home_tokens, {r.work, s.rank_work.max},
                                        format_si(static_cast<double>(r.work)), r.bytes_in,
                                        r.bytes_out, s.limit_bytes,
                                        rank == s.limit_rank && s.limit_bytes > 0, style);
             },
             style);
}

}  // namespace

std::string text_summary(const QkvPlan& plan, const QkvRouting& routing, const PlanSummary& summary,
                         const TextStyle& style) {
  detail::check_not_negative("text_summary", "gb_per_s", style.gb_per_s);
  return concat(
      plan_block(summary, style), "\n", traffic_block(summary, style), "\n",
      rank_block(summary, style), "\n",
      detail::meaning("What it means", explain(plan, routing, summary, style.gb_per_s), style));
}

}  // namespace waybill
