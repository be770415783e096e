#include "report/plan_figures.h"

#include <algorithm>
#include <utility>

#include "figures.h"
#include "routing/homes.h"
#include "waybill/core/error.h"

namespace waybill {

std::vector<DocumentFigures> document_figures(const QkvPlan& plan) {
  plan.check("document_figures");
  const std::vector<std::int32_t> home = detail::homes_of(plan.rank_shard_offsets);
  std::vector<DocumentFigures> result(plan.num_documents());
  // The last document that was seen at a rank, so that each rank counts once per document.
  std::vector<std::int64_t> seen_home(plan.world_size, -1);
  std::vector<std::int64_t> seen_attending(plan.world_size, -1);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    DocumentFigures& document = result[d];
    document.document = d;
    for (std::int64_t i = plan.doc_shard_offsets[d]; i < plan.doc_shard_offsets[d + 1]; ++i) {
      const std::size_t shard = plan.doc_shards[i];
      document.tokens += plan.shard_len[shard];
      ++document.num_shards;
      if (std::exchange(seen_home[home[shard]], d) != d) ++document.num_home_ranks;
      if (std::exchange(seen_attending[plan.q_dst[shard]], d) != d) ++document.num_attending_ranks;
    }
  }
  return result;
}

namespace {

// Rows of `table` that cross the wire at `rank`, summed by document.
template <class Add>
void for_wire_rows(const QkvPlan& plan, const SparseMetadata& table, std::int32_t rank,
                   Direction direction, const Add& add) {
  for (std::int32_t src = 0; src < plan.world_size; ++src) {
    if (direction == Direction::out ? src != rank : src == rank) continue;
    const std::int64_t end = plan.rank_shard_offsets[src + 1];
    for (std::int64_t n = plan.rank_shard_offsets[src]; n < end; ++n) {
      for (std::int64_t c = table.destination_begin(n); c < table.destination_end(n); ++c) {
        const std::int32_t dst = table.dst_rank[c];
        if (direction == Direction::out ? dst != rank : dst == rank) add(n, plan.shard_len[n]);
      }
    }
  }
}

}  // namespace

std::vector<DocumentBytes> document_bytes(const QkvPlan& plan, const QkvRouting& routing,
                                          const RowBytes& row_bytes, std::int32_t rank,
                                          Direction direction) {
  constexpr const char* who = "document_bytes";
  detail::check_belongs(plan, routing, row_bytes, who);
  require(0 <= rank && rank < plan.world_size, who, ": rank = ", rank, ", expected 0..",
          plan.world_size - 1);
  const std::vector<std::int64_t> document = detail::document_of_shards(plan);
  std::vector<DocumentBytes> result(plan.num_documents());
  for (std::size_t d = 0; d < result.size(); ++d) result[d].document = static_cast<std::int64_t>(d);

  for_wire_rows(plan, routing.fwd_q, rank, direction, [&](std::int64_t shard, std::int64_t rows) {
    std::int64_t& sum = result[document[shard]].q_bytes;
    sum = detail::checked_add(sum, detail::checked_mul(rows, row_bytes.q, who), who);
  });
  for_wire_rows(plan, routing.fwd_kv, rank, direction, [&](std::int64_t shard, std::int64_t rows) {
    std::int64_t& sum = result[document[shard]].kv_bytes;
    sum = detail::checked_add(sum, detail::checked_mul(rows, row_bytes.kv, who), who);
  });

  std::erase_if(result, [](const DocumentBytes& d) { return d.bytes() == 0; });
  std::stable_sort(result.begin(), result.end(),
                   [](const auto& a, const auto& b) { return a.bytes() > b.bytes(); });
  return result;
}

}  // namespace waybill
