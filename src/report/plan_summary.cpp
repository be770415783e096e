#include "waybill/report/plan_summary.h"

#include <algorithm>
#include <utility>

#include "core/checks.h"
#include "report/plan_figures.h"
#include "routing/homes.h"
#include "waybill/core/error.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* who) {
  std::int64_t result = 0;
  require(!__builtin_mul_overflow(a, b, &result), who, ": ", a, " * ", b, " exceeds 2^63 - 1");
  return result;
}

std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* who) {
  std::int64_t result = 0;
  require(!__builtin_add_overflow(a, b, &result), who, ": ", a, " + ", b, " exceeds 2^63 - 1");
  return result;
}

namespace {

void check_table(const QkvPlan& plan, const SparseMetadata& table, const char* name,
                 const char* who) {
  require(table.world_size == plan.world_size, who, ": routing.", name,
          ".world_size = ", table.world_size, ", expected the plan's, ", plan.world_size);
  require(table.num_entries() == plan.num_shards(), who, ": routing.", name, " has ",
          table.num_entries(), " entries, expected one per shard, ", plan.num_shards());
  require(std::equal(table.seq_len.begin(), table.seq_len.end(), plan.shard_len.begin()), who,
          ": routing.", name, ".seq_len differs from the plan's shard_len");
  const std::int64_t num_destinations =
      plan.num_shards() == 0 ? 0 : table.destination_end(plan.num_shards() - 1);
  require(num_destinations == table.num_destinations(), who, ": routing.", name, ".dst_rank has ",
          table.num_destinations(), " entries, expected ", num_destinations);
  for (const std::int32_t rank : table.dst_rank) {
    require(0 <= rank && rank < plan.world_size, who, ": routing.", name, ".dst_rank = ", rank,
            ", expected 0..", plan.world_size - 1);
  }
  const RecvCounts& recv = table.recv;
  require(std::ssize(recv.offsets) == plan.world_size + 1 &&
              std::ssize(recv.src_rank) == recv.offsets.back() &&
              recv.tokens.size() == recv.src_rank.size(),
          who, ": routing.", name, ".recv has tables of other lengths than its offsets say");
}

}  // namespace

void check_belongs(const QkvPlan& plan, const QkvRouting& routing, const RowBytes& row_bytes,
                   const char* who) {
  plan.check(who);
  check_at_least(who, "row_bytes.q", row_bytes.q, 0);
  check_at_least(who, "row_bytes.kv", row_bytes.kv, 0);
  check_table(plan, routing.fwd_q, "fwd_q", who);
  check_table(plan, routing.fwd_kv, "fwd_kv", who);
}

}  // namespace waybill::detail

namespace waybill {

std::vector<DocumentFigures> document_figures(const QkvPlan& plan) {
  plan.check("document_figures");
  std::vector<DocumentFigures> result(plan.num_documents());
  // The last document that was seen at a rank, so that each rank counts once per document.
  std::vector<std::int64_t> seen_attending(plan.world_size, -1);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    DocumentFigures& document = result[d];
    document.document = d;
    for (const std::int32_t shard : detail::shards_of(plan, d)) {
      document.tokens += plan.shard_len[shard];
      ++document.num_shards;
      if (std::exchange(seen_attending[plan.q_dst[shard]], d) != d) ++document.num_attending_ranks;
    }
  }
  return result;
}

std::vector<DocumentBytes> document_bytes(const QkvPlan& plan, const QkvRouting& routing,
                                          const RowBytes& row_bytes, std::int32_t rank,
                                          Direction direction) {
  constexpr const char* who = "document_bytes";
  detail::check_belongs(plan, routing, row_bytes, who);
  detail::check_range(who, "rank", rank, 0, plan.world_size - 1);
  std::vector<DocumentBytes> result(plan.num_documents());
  std::vector<std::int64_t> document(plan.num_shards());  // [N]
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    result[d].document = d;
    for (const std::int32_t shard : detail::shards_of(plan, d)) document[shard] = d;
  }
  const bool out = direction == Direction::out;
  const std::vector<std::int32_t> home = detail::homes_of(plan.rank_shard_offsets);
  const auto add_wire_rows = [&](const SparseMetadata& table, std::int64_t bytes_of_row,
                                 std::int64_t DocumentBytes::*sum) {
    for (std::int64_t n = 0; n < plan.num_shards(); ++n) {
      if ((home[n] == rank) != out) continue;
      for (std::int64_t c = table.destination_begin(n); c < table.destination_end(n); ++c) {
        if ((table.dst_rank[c] == rank) == out) continue;
        std::int64_t& bytes = result[document[n]].*sum;
        bytes = detail::checked_add(bytes,
                                    detail::checked_mul(plan.shard_len[n], bytes_of_row, who), who);
      }
    }
  };
  add_wire_rows(routing.fwd_q, row_bytes.q, &DocumentBytes::q_bytes);
  add_wire_rows(routing.fwd_kv, row_bytes.kv, &DocumentBytes::kv_bytes);

  std::erase_if(result, [](const DocumentBytes& d) { return d.bytes() == 0; });
  std::stable_sort(result.begin(), result.end(),
                   [](const auto& a, const auto& b) { return a.bytes() > b.bytes(); });
  return result;
}

namespace {

using detail::checked_add;
using detail::checked_mul;

constexpr const char* in_summarize = "summarize";

void count_homes_and_work(const QkvPlan& plan, PlanSummary& summary) {
  const std::vector<std::int64_t> work = shard_work(plan);
  for (std::int32_t rank = 0; rank < plan.world_size; ++rank) {
    RankFigures& home = summary.ranks[rank];
    const std::int64_t end = plan.rank_shard_offsets[rank + 1];
    for (std::int64_t n = plan.rank_shard_offsets[rank]; n < end; ++n) {
      home.home_tokens += plan.shard_len[n];
      ++home.home_shards;
      RankFigures& attending = summary.ranks[plan.q_dst[n]];
      ++attending.attended_shards;
      attending.work = checked_add(attending.work, work[n], in_summarize);
      summary.work = checked_add(summary.work, work[n], in_summarize);
      summary.longest_shard = std::max(summary.longest_shard, plan.shard_len[n]);
    }
    summary.num_tokens += home.home_tokens;
  }
}

void count_documents(const QkvPlan& plan, PlanSummary& summary) {
  std::vector<std::int64_t> lengths;
  for (const DocumentFigures& document : document_figures(plan)) lengths.push_back(document.tokens);
  if (lengths.empty()) return;
  const auto middle = lengths.begin() + (std::ssize(lengths) - 1) / 2;
  std::nth_element(lengths.begin(), middle, lengths.end());
  summary.median_document = *middle;
  summary.longest_document = *std::max_element(middle, lengths.end());
}

// Both lists are ordered by source rank: merges them into one list of pairs.
void merge_pairs(const RecvCounts& q, const RecvCounts& kv, std::int32_t dst,
                 PlanSummary& summary) {
  std::int64_t i = q.offsets[dst];
  std::int64_t j = kv.offsets[dst];
  const std::int64_t q_end = q.offsets[dst + 1];
  const std::int64_t kv_end = kv.offsets[dst + 1];
  while (i < q_end || j < kv_end) {
    const std::int32_t q_src = i < q_end ? q.src_rank[i] : summary.world_size;
    const std::int32_t kv_src = j < kv_end ? kv.src_rank[j] : summary.world_size;
    TrafficPair pair{.src_rank = std::min(q_src, kv_src), .dst_rank = dst};
    detail::check_range(in_summarize, "recv.src_rank", pair.src_rank, 0, summary.world_size - 1);
    if (q_src == pair.src_rank) pair.q_rows = q.tokens[i++];
    if (kv_src == pair.src_rank) pair.kv_rows = kv.tokens[j++];
    if (pair.src_rank != pair.dst_rank) {
      pair.bytes =
          checked_add(checked_mul(pair.q_rows, summary.row_bytes.q, in_summarize),
                      checked_mul(pair.kv_rows, summary.row_bytes.kv, in_summarize), in_summarize);
    }
    summary.pairs.push_back(pair);
  }
}

void add_rows(RankTraffic& src, RankTraffic& dst, RankTraffic& sum, std::int64_t rows) {
  if (&src == &dst) {
    src.rows_local += rows;
    sum.rows_local += rows;
    return;
  }
  src.rows_out += rows;
  dst.rows_in += rows;
  sum.rows_out += rows;
  sum.rows_in += rows;
}

void count_traffic(PlanSummary& summary) {
  for (const TrafficPair& pair : summary.pairs) {
    RankFigures& src = summary.ranks[pair.src_rank];
    RankFigures& dst = summary.ranks[pair.dst_rank];
    add_rows(src.q, dst.q, summary.q, pair.q_rows);
    add_rows(src.kv, dst.kv, summary.kv, pair.kv_rows);
    src.bytes_out = checked_add(src.bytes_out, pair.bytes, in_summarize);
    dst.bytes_in = checked_add(dst.bytes_in, pair.bytes, in_summarize);
    summary.wire_bytes = checked_add(summary.wire_bytes, pair.bytes, in_summarize);
    if (pair.src_rank != pair.dst_rank) ++summary.num_wire_pairs;
  }
  for (RankFigures& rank : summary.ranks) {
    rank.buffer_bytes = checked_add(
        checked_mul(rank.q.rows_in + rank.q.rows_local, summary.row_bytes.q, in_summarize),
        checked_mul(rank.kv.rows_in + rank.kv.rows_local, summary.row_bytes.kv, in_summarize),
        in_summarize);
  }
  if (summary.num_tokens > 0) {
    summary.kv_copies = static_cast<double>(summary.kv.rows_in + summary.kv.rows_local) /
                        static_cast<double>(summary.num_tokens);
  }
}

}  // namespace

double PlanSummary::limit_seconds(double gb_per_s) const {
  detail::check_positive("limit_seconds", "gb_per_s", gb_per_s);
  return static_cast<double>(taken_limit().bytes) / (gb_per_s * 1e9);
}

RankLimit limit_of(std::span<const std::int64_t> bytes_in,
                   std::span<const std::int64_t> bytes_out) {
  RankLimit limit;
  for (const auto& [bytes, direction] :
       {std::pair{bytes_in, Direction::in}, {bytes_out, Direction::out}}) {
    for (std::size_t r = 0; r < bytes.size(); ++r) {
      if (bytes[r] > limit.bytes) limit = {bytes[r], static_cast<std::int32_t>(r), direction};
    }
  }
  return limit;
}

PlanSummary summarize(const QkvPlan& plan, const QkvRouting& routing, const RowBytes& row_bytes) {
  detail::check_belongs(plan, routing, row_bytes, in_summarize);
  PlanSummary summary;
  summary.world_size = plan.world_size;
  summary.kv_layout = plan.kv_layout;
  summary.row_bytes = row_bytes;
  summary.num_documents = plan.num_documents();
  summary.num_shards = plan.num_shards();
  summary.ranks.resize(plan.world_size);
  count_homes_and_work(plan, summary);
  count_documents(plan, summary);
  for (std::int32_t dst = 0; dst < plan.world_size; ++dst)
    merge_pairs(routing.fwd_q.recv, routing.fwd_kv.recv, dst, summary);
  count_traffic(summary);

  summary.rank_work = detail::spread_of(summary.ranks, &RankFigures::work);
  summary.rank_bytes_in = detail::spread_of(summary.ranks, &RankFigures::bytes_in);
  summary.rank_bytes_out = detail::spread_of(summary.ranks, &RankFigures::bytes_out);
  const bool in = summary.rank_bytes_in.max >= summary.rank_bytes_out.max;
  const Spread& limit = in ? summary.rank_bytes_in : summary.rank_bytes_out;
  summary.limit_bytes = limit.max;
  summary.limit_rank = limit.max_rank;
  summary.limit_direction = in ? Direction::in : Direction::out;
  return summary;
}

}  // namespace waybill
