#include "waybill/routing/raw_dispatch.h"

#include <algorithm>

#include "waybill/core/error.h"

namespace waybill {
namespace {

/// Where a shard stands in the dense tables.
struct Entry {
  std::int64_t rank;
  std::int64_t idx;
};

std::vector<Entry> find_entries(const QkvPlan& plan) {
  std::vector<Entry> entries;
  entries.reserve(plan.num_shards());
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    const std::int64_t count = plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w];
    for (std::int64_t s = 0; s < count; ++s) entries.push_back({w, s});
  }
  return entries;
}

RawQkvDispatch padding(std::int64_t world, std::int64_t shards, std::int64_t copies) {
  return {.cp_seq_lens = IndexArray({world, shards}),
          .num_cp_shards = IndexArray({world}),
          .cp_query_dst = IndexArray::full({world, shards}, -1),
          .kv = {.kv_to_q_mapping = IndexArray::full({world, shards, copies, 2}, -1),
                 .kv_to_q_rank = IndexArray::full({world, shards, copies}, -1),
                 .kv_context_size = IndexArray({world, shards}),
                 .q_to_num_kv_seq = IndexArray({world, shards}),
                 .q_to_num_kv_token = IndexArray({world, shards})}};
}

/// KV shard p of a document serves its query shards p, p + 1, ...: copy c is query p + c.
void fill_document(const QkvPlan& plan, const std::vector<Entry>& entries, std::int64_t doc,
                   RawQkvDispatch& raw) {
  const std::int64_t shards_per_rank = raw.cp_seq_lens.dim(1);
  const std::int64_t copies = raw.kv.kv_to_q_rank.dim(2);
  const std::int64_t first = plan.doc_shard_offsets[doc];
  const std::int64_t num_shards = plan.doc_shard_offsets[doc + 1] - first;
  const auto mapping = raw.kv.kv_to_q_mapping.i64();
  const auto place = raw.kv.kv_to_q_rank.i64();
  std::int64_t rows = 0;
  for (std::int64_t p = 0; p < num_shards; ++p) {
    const std::size_t shard = plan.doc_shards[first + p];
    const std::size_t entry = entries[shard].rank * shards_per_rank + entries[shard].idx;
    raw.cp_seq_lens.i64()[entry] = plan.shard_len[shard];
    raw.cp_query_dst.i64()[entry] = plan.q_dst[shard];
    raw.kv.kv_context_size.i64()[entry] = rows;
    rows += plan.shard_len[shard];
    raw.kv.q_to_num_kv_seq.i64()[entry] = p + 1;
    raw.kv.q_to_num_kv_token.i64()[entry] = rows;
    for (std::int64_t c = 0; p + c < num_shards; ++c) {
      const Entry& query = entries[plan.doc_shards[first + p + c]];
      const auto copy = entry * copies + c;
      place[copy] = p;
      mapping[2 * copy] = query.rank;
      mapping[2 * copy + 1] = query.idx;
    }
  }
}

}  // namespace

RawQkvDispatch to_raw_dispatch(const QkvPlan& plan, std::int64_t max_cp_degree) {
  plan.check("to_raw_dispatch");
  const bool windows = std::any_of(plan.kv_begin.begin(), plan.kv_begin.end(),
                                   [](std::int32_t begin) { return begin != 0; });
  require(plan.mask == MaskKind::causal,
          "to_raw_dispatch: plan.mask = full, expected a causal plan: this form has no other mask");
  require(!windows, "to_raw_dispatch: plan.kv_begin has a window, expected a causal plan: this ",
          "form cannot express one");
  std::int64_t most_shards = 0;
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    most_shards =
        std::max(most_shards, plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w]);
  }
  std::int64_t copies = max_cp_degree;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    copies = std::max(copies, plan.doc_shard_offsets[d + 1] - plan.doc_shard_offsets[d]);
  }
  RawQkvDispatch raw = padding(plan.world_size, most_shards, copies);
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    raw.num_cp_shards.i64()[w] = plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w];
  }
  const std::vector<Entry> entries = find_entries(plan);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) fill_document(plan, entries, d, raw);
  return raw;
}

}  // namespace waybill
