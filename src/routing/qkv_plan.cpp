#include "waybill/routing/qkv_plan.h"

#include <algorithm>
#include <span>

#include "homes.h"
#include "waybill/core/error.h"
#include "waybill/routing/generators.h"

namespace waybill {
std::string_view to_string(KvLayout layout) {
  return layout == KvLayout::per_query ? "per_query" : "per_rank";
}

KvLayout kv_layout_from_name(const char* who, std::string_view name) {
  require(name == "per_rank" || name == "per_query", who, ": kv_layout = \"", name,
          "\", expected \"per_rank\" or \"per_query\"");
  return name == "per_query" ? KvLayout::per_query : KvLayout::per_rank;
}

std::string_view to_string(MaskKind mask) { return mask == MaskKind::full ? "full" : "causal"; }

MaskKind mask_from_name(const char* who, std::string_view name) {
  require(name == "causal" || name == "full", who, ": mask = \"", name,
          "\", expected \"causal\" or \"full\"");
  return name == "full" ? MaskKind::full : MaskKind::causal;
}

namespace {

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
/// @param home [N]: rank of each shard
void fill_document(const QkvPlan& plan, std::span<const std::int32_t> home, std::int64_t doc,
                   RawQkvDispatch& raw) {
  const std::int64_t shards_per_rank = raw.cp_seq_lens.dim(1);
  const std::int64_t copies = raw.kv.kv_to_q_rank.dim(2);
  const std::int64_t first = plan.doc_shard_offsets[doc];
  const std::int64_t num_shards = plan.doc_shard_offsets[doc + 1] - first;
  const auto idx_on_rank = [&](std::int64_t shard) {
    return shard - plan.rank_shard_offsets[home[shard]];
  };
  const auto mapping = raw.kv.kv_to_q_mapping.i64();
  const auto place = raw.kv.kv_to_q_rank.i64();
  std::int64_t rows = 0;
  for (std::int64_t p = 0; p < num_shards; ++p) {
    const std::size_t shard = plan.doc_shards[first + p];
    const std::int64_t entry = home[shard] * shards_per_rank + idx_on_rank(shard);
    raw.cp_seq_lens.i64()[entry] = plan.shard_len[shard];
    raw.cp_query_dst.i64()[entry] = plan.q_dst[shard];
    raw.kv.kv_context_size.i64()[entry] = rows;
    rows += plan.shard_len[shard];
    raw.kv.q_to_num_kv_seq.i64()[entry] = p + 1;
    raw.kv.q_to_num_kv_token.i64()[entry] = rows;
    for (std::int64_t c = 0; p + c < num_shards; ++c) {
      const std::size_t query = plan.doc_shards[first + p + c];
      const auto copy = entry * copies + c;
      place[copy] = p;
      mapping[2 * copy] = home[query];
      mapping[2 * copy + 1] = idx_on_rank(query);
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
  const std::int64_t max_shards = detail::largest_part(plan.rank_shard_offsets);
  const std::int64_t copies = std::max(max_cp_degree, detail::largest_part(plan.doc_shard_offsets));
  RawQkvDispatch raw = padding(plan.world_size, max_shards, copies);
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    raw.num_cp_shards.i64()[w] = plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w];
  }
  const std::vector<std::int32_t> home = detail::homes_of(plan.rank_shard_offsets);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) fill_document(plan, home, d, raw);
  return raw;
}

std::vector<std::int64_t> shard_work(const QkvPlan& plan) {
  plan.check("shard_work");
  std::vector<std::int64_t> work(plan.shard_len.size());
  std::vector<std::int64_t> context;  // by position
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    context.assign(1, 0);
    std::int64_t doc_rows = 0;
    if (plan.mask == MaskKind::full) {
      for (std::int64_t k = plan.doc_shard_offsets[d]; k < plan.doc_shard_offsets[d + 1]; ++k) {
        doc_rows += plan.shard_len[plan.doc_shards[k]];
      }
    }
    for (std::int64_t k = plan.doc_shard_offsets[d]; k < plan.doc_shard_offsets[d + 1]; ++k) {
      const std::size_t shard = plan.doc_shards[k];
      const std::int64_t q_len = plan.shard_len[shard];
      const std::int64_t end = context.back() + q_len;
      require(end <= (std::int64_t{1} << 31), "shard_work: document ", d,
              " has over 2^31 tokens: ", "its work does not fit int64");
      const std::int64_t begin = plan.kv_begin.empty() ? 0 : context[plan.kv_begin[shard]];
      work[shard] = plan.mask == MaskKind::full ? q_len * doc_rows
                                                : q_len * (end - begin) - q_len * (q_len - 1) / 2;
      context.push_back(end);
    }
  }
  return work;
}

std::vector<std::int64_t> rank_work(const QkvPlan& plan) {
  const std::vector<std::int64_t> work = shard_work(plan);
  std::vector<std::int64_t> sums(plan.world_size);
  for (std::size_t s = 0; s < work.size(); ++s) {
    std::int64_t& sum = sums[plan.q_dst[s]];
    require(!__builtin_add_overflow(sum, work[s], &sum), "rank_work: the work of rank ",
            plan.q_dst[s], " does not fit int64");
  }
  return sums;
}

}  // namespace waybill
