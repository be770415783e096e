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

namespace {

/// Calls visit(shard, shards of its document), also of tables that may be damaged.
template <class Visit>
void for_each_in_documents(const QkvPlan& plan, const Visit& visit) {
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = std::max<std::int64_t>(0, plan.doc_shard_offsets[d]);
    const std::int64_t last = std::min(plan.doc_shard_offsets[d + 1], std::ssize(plan.doc_shards));
    for (std::int64_t k = first; k < last; ++k) {
      const std::int32_t shard = plan.doc_shards[k];
      if (0 <= shard && shard < plan.num_shards())
        visit(shard, static_cast<std::int32_t>(last - first));
    }
  }
}

}  // namespace

void QkvPlan::need_whole_documents() {
  kv_begin.clear();
  kv_end.assign(shard_len.size(), 0);
  for_each_in_documents(*this, [&](std::int32_t shard, std::int32_t num) { kv_end[shard] = num; });
}

bool QkvPlan::needs_whole_documents() const {
  if (!kv_begin.empty() || kv_end.empty() || kv_end.size() != shard_len.size()) return false;
  bool whole = true;
  for_each_in_documents(
      *this, [&](std::int32_t shard, std::int32_t num) { whole = whole && kv_end[shard] == num; });
  return whole;
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
  require(plan.kv_end.empty(), "to_raw_dispatch: plan.kv_end has ", plan.kv_end.size(),
          " values, expected none: this form has causal plans alone");
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
    for (const std::int32_t shard : detail::shards_of(plan, d))
      context.push_back(context.back() + plan.shard_len[shard]);
    require(context.back() <= (std::int64_t{1} << 31), "shard_work: document ", d,
            " has over 2^31 tokens: ", "its work does not fit int64");
    std::int32_t position = 0;
    for (const std::int32_t shard : detail::shards_of(plan, d)) {
      const std::int64_t q_len = plan.shard_len[shard];
      const std::int64_t keys =
          context[plan.end_needed(shard, position++)] - context[plan.first_needed(shard)];
      work[shard] = q_len * keys - (plan.is_causal(shard) ? q_len * (q_len - 1) / 2 : 0);
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

std::optional<std::int64_t> detail::document_of_too_many_copies(const QkvPlan& plan) {
  std::int64_t copies = 0;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t n = plan.doc_shard_offsets[d + 1] - plan.doc_shard_offsets[d];
    const std::int64_t holders = plan.kv_layout == KvLayout::per_query
                                     ? (n + 1) / 2
                                     : std::min<std::int64_t>(n, plan.world_size);
    copies += n * holders;  // both factors are below 2^31, and the sum is looked at every time
    if (copies > max_kv_copies) return d;
  }
  return std::nullopt;
}

}  // namespace waybill
