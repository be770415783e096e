#include "waybill/routing/qkv_plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "dense_checks.h"
#include "waybill/core/error.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

/// Offsets of a partition of `size` items into `num_parts`: begin at 0, never fall, end at size.
void check_offsets(const char* who, const char* name, const std::vector<std::int64_t>& offsets,
                   std::int64_t num_parts, std::int64_t size) {
  require(std::ssize(offsets) == num_parts + 1, who, ": plan.", name, " has ", offsets.size(),
          " values, expected ", num_parts + 1);
  require(offsets.front() == 0, who, ": plan.", name, "[0] = ", offsets.front(), ", expected 0");
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    require(offsets[i - 1] <= offsets[i], who, ": plan.", name, "[", i, "] = ", offsets[i],
            ", expected at least ", offsets[i - 1], ", the value before it");
  }
  require(offsets.back() == size, who, ": plan.", name, "[", num_parts, "] = ", offsets.back(),
          ", expected ", size);
}

void check_shards(const QkvPlan& plan, const char* who) {
  require(std::ssize(plan.q_dst) == plan.num_shards(), who, ": plan.q_dst has ", plan.q_dst.size(),
          " values, expected ", plan.num_shards(), " (as shard_len)");
  std::int64_t total = 0;
  for (std::size_t i = 0; i < plan.shard_len.size(); ++i) {
    const std::int64_t rows = plan.shard_len[i];
    require(0 <= rows && rows <= detail::max_total_rows, who, ": plan.shard_len[", i, "] = ", rows,
            ", expected 0..2^40 tokens");
    total += rows;
    require(total <= detail::max_total_rows, who,
            ": the sum of plan.shard_len exceeds 2^40 tokens at shard ", i);
    require(0 <= plan.q_dst[i] && plan.q_dst[i] < plan.world_size, who, ": plan.q_dst[", i,
            "] = ", plan.q_dst[i], ", expected a rank of 0..", plan.world_size - 1);
  }
}

void check_documents(const QkvPlan& plan, const char* who) {
  std::vector<bool> seen(plan.shard_len.size(), false);
  for (std::size_t i = 0; i < plan.doc_shards.size(); ++i) {
    const std::int32_t shard = plan.doc_shards[i];
    require(0 <= shard && shard < plan.num_shards(), who, ": plan.doc_shards[", i, "] = ", shard,
            ", expected a shard of 0..", plan.num_shards() - 1);
    require(!seen[shard], who, ": plan.doc_shards[", i, "] = ", shard,
            ", but this shard is in a document already; expected each shard once");
    seen[shard] = true;
  }
}

void check_windows(const QkvPlan& plan, const char* who) {
  if (plan.kv_begin.empty()) return;
  require(plan.mask == MaskKind::causal, who, ": plan.kv_begin has ", plan.kv_begin.size(),
          " values, expected none: the mask is full");
  require(std::ssize(plan.kv_begin) == plan.num_shards(), who, ": plan.kv_begin has ",
          plan.kv_begin.size(), " values, expected ", plan.num_shards(), " or none");
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::int32_t before = 0;
    const std::int64_t first = plan.doc_shard_offsets[d];
    const std::int64_t last = plan.doc_shard_offsets[d + 1];
    for (std::int64_t p = 0; p < last - first; ++p) {
      const auto shard = static_cast<std::size_t>(plan.doc_shards[first + p]);
      const std::int32_t begin = plan.kv_begin[shard];
      require(before <= begin && begin <= p, who, ": plan.kv_begin[", shard, "] = ", begin,
              ", expected ", before, "..", p, " (position ", p, " of document ", d, ")");
      before = begin;
    }
  }
}

}  // namespace

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

void QkvPlan::check(const char* who) const {
  require(1 <= world_size && world_size <= max_world_size, who, ": plan.world_size = ", world_size,
          ", expected 1..", max_world_size);
  require(num_shards() <= std::numeric_limits<std::int32_t>::max(), who, ": plan has ",
          num_shards(), " shards, expected at most 2^31 - 1");
  check_offsets(who, "rank_shard_offsets", rank_shard_offsets, world_size, num_shards());
  check_shards(*this, who);
  require(std::ssize(doc_shards) == num_shards(), who, ": plan.doc_shards has ", doc_shards.size(),
          " values, expected ", num_shards(), ", each shard once");
  check_offsets(who, "doc_shard_offsets", doc_shard_offsets, num_documents(), num_shards());
  check_documents(*this, who);
  check_windows(*this, who);
}

namespace {

/// Rank and index of each shard in the dense tables.
std::vector<std::pair<std::int64_t, std::int64_t>> find_entries(const QkvPlan& plan) {
  std::vector<std::pair<std::int64_t, std::int64_t>> entries;
  entries.reserve(plan.num_shards());
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    const std::int64_t count = plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w];
    for (std::int64_t s = 0; s < count; ++s) entries.emplace_back(w, s);
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
void fill_document(const QkvPlan& plan,
                   const std::vector<std::pair<std::int64_t, std::int64_t>>& entries,
                   std::int64_t doc, RawQkvDispatch& raw) {
  const std::int64_t shards_per_rank = raw.cp_seq_lens.dim(1);
  const std::int64_t copies = raw.kv.kv_to_q_rank.dim(2);
  const std::int64_t first = plan.doc_shard_offsets[doc];
  const std::int64_t num_shards = plan.doc_shard_offsets[doc + 1] - first;
  const auto mapping = raw.kv.kv_to_q_mapping.i64();
  const auto place = raw.kv.kv_to_q_rank.i64();
  std::int64_t rows = 0;
  for (std::int64_t p = 0; p < num_shards; ++p) {
    const std::size_t shard = plan.doc_shards[first + p];
    const std::int64_t entry = entries[shard].first * shards_per_rank + entries[shard].second;
    raw.cp_seq_lens.i64()[entry] = plan.shard_len[shard];
    raw.cp_query_dst.i64()[entry] = plan.q_dst[shard];
    raw.kv.kv_context_size.i64()[entry] = rows;
    rows += plan.shard_len[shard];
    raw.kv.q_to_num_kv_seq.i64()[entry] = p + 1;
    raw.kv.q_to_num_kv_token.i64()[entry] = rows;
    for (std::int64_t c = 0; p + c < num_shards; ++c) {
      const auto& [query_rank, query_idx] = entries[plan.doc_shards[first + p + c]];
      const auto copy = entry * copies + c;
      place[copy] = p;
      mapping[2 * copy] = query_rank;
      mapping[2 * copy + 1] = query_idx;
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
  std::int64_t max_shards = 0;
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    max_shards = std::max(max_shards, plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w]);
  }
  std::int64_t copies = max_cp_degree;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    copies = std::max(copies, plan.doc_shard_offsets[d + 1] - plan.doc_shard_offsets[d]);
  }
  RawQkvDispatch raw = padding(plan.world_size, max_shards, copies);
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    raw.num_cp_shards.i64()[w] = plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w];
  }
  const std::vector<std::pair<std::int64_t, std::int64_t>> entries = find_entries(plan);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) fill_document(plan, entries, d, raw);
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
