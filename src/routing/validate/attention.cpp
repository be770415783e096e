#include <algorithm>

#include "checks.h"

namespace waybill::validation {
namespace {

constexpr const char* attention_table = "attention";
using Values = std::span<const std::int64_t>;
using Flat = UninitializedVector<std::int64_t>;

/// The layout as it must be: the received query shards of each rank in the global order.
SparseAttnLayout expect(const PlanIndex& index) {
  const QkvPlan& plan = *index.plan;
  const std::size_t n = plan.shard_len.size();
  SparseAttnLayout result{.rank_offsets = index.rank_offsets,
                          .shard = UninitializedVector<std::int32_t>(n),
                          .q_begin = Flat(n),
                          .q_len = Flat(n),
                          .kv_row = Flat(n),
                          .kv_len = Flat(n),
                          .max_seqlen_q = std::vector<std::int64_t>(plan.world_size),
                          .max_seqlen_kv = std::vector<std::int64_t>(plan.world_size)};
  std::vector<std::int64_t> next(index.rank_offsets.begin(), index.rank_offsets.end() - 1);
  std::vector<std::int64_t> filled(plan.world_size);
  UninitializedVector<std::int32_t> entry_of(n);  // [N] by shard
  for (std::size_t s = 0; s < n; ++s) {
    const std::size_t r = plan.q_dst[s];
    const std::size_t entry = next[r]++;
    entry_of[s] = static_cast<std::int32_t>(entry);
    result.shard[entry] = static_cast<std::int32_t>(s);
    result.q_begin[entry] = filled[r];
    result.q_len[entry] = plan.shard_len[s];
    result.max_seqlen_q[r] = std::max(result.max_seqlen_q[r], plan.shard_len[s]);
    filled[r] += plan.shard_len[s];
  }
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    walk_kv(index, r, [&](const KvStep& step) {
      const std::int32_t entry = entry_of[index.shard(step.query)];
      result.kv_row[entry] = step.kv_row;
      result.kv_len[entry] = step.kv_len;
      result.max_seqlen_kv[r] = std::max(result.max_seqlen_kv[r], step.kv_len);
    });
  }
  return result;
}

/// Compares the values of one rank; -1: one value per rank.
void compare(const char* field, std::int32_t rank, Values got, Values expected,
             Findings& findings) {
  if (std::ranges::equal(got, expected)) return;
  for (std::int64_t i = 0; i < std::ssize(expected); ++i) {
    if (got[i] == expected[i]) continue;
    const Place place = rank < 0 ? Place{.rank = i} : Place{.rank = rank, .shard = i};
    findings.add(FindingKind::attention, attention_table, field, place, got[i], expected[i]);
  }
}

bool check_sizes(const SparseAttnLayout& attention, std::int64_t world, std::int64_t num_shards,
                 Findings& findings) {
  const auto check = [&](const char* field, const auto& values, std::int64_t expected) {
    return check_size(attention_table, field, std::ssize(values), expected, findings);
  };
  bool ok = check("rank_offsets", attention.rank_offsets, world + 1);
  ok &= check("shard", attention.shard, num_shards);
  ok &= check("q_begin", attention.q_begin, num_shards);
  ok &= check("q_len", attention.q_len, num_shards);
  ok &= check("kv_row", attention.kv_row, num_shards);
  ok &= check("kv_len", attention.kv_len, num_shards);
  ok &= check("max_seqlen_q", attention.max_seqlen_q, world);
  return check("max_seqlen_kv", attention.max_seqlen_kv, world) && ok;
}

/// The values of one rank in a table of all.
Values values_of(const SparseAttnLayout& layout, const Flat& values, std::int32_t rank) {
  const std::int64_t first = layout.rank_offsets[rank];
  return std::span(values).subspan(first, layout.rank_offsets[rank + 1] - first);
}

/// Compares the arrays of the dense form, one per rank. @param sums they are prefix sums of
/// `values`
void check_arrays(const char* field, const std::vector<IndexArray>& arrays, bool wanted,
                  const SparseAttnLayout& expected, const Flat& values, bool sums,
                  Findings& findings) {
  const auto world = static_cast<std::int32_t>(expected.max_seqlen_q.size());
  if (!wanted && arrays.empty()) return;
  const std::int64_t num_arrays = wanted ? world : 0;
  if (!check_size(attention_table, field, std::ssize(arrays), num_arrays, findings) || !wanted)
    return;
  std::vector<std::int64_t> list;
  for (std::int32_t r = 0; r < world && !findings.full(); ++r) {
    list.assign(sums ? 1 : 0, 0);
    for (const std::int64_t value : values_of(expected, values, r))
      list.push_back(sums ? add_rows(list.back(), value) : value);
    check_dtype(attention_table, field, arrays[r], DType::int64, "attention layout", findings);
    if (arrays[r].ndim() != 1 || arrays[r].size() != std::ssize(list)) {
      findings.add(FindingKind::shape, attention_table, field, {.rank = r},
                   to_string(arrays[r].shape()), concat("[", list.size(), "]"));
      continue;
    }
    compare(field, r, IndexReader(arrays[r]).span(), list, findings);
  }
}

}  // namespace

void check_attention(const SparseAttnLayout& attention, const PlanIndex& index,
                     Findings& findings) {
  const std::int32_t world = index.plan->world_size;
  if (!check_sizes(attention, world, index.plan->num_shards(), findings)) return;
  const SparseAttnLayout expected = expect(index);
  if (attention.rank_offsets != expected.rank_offsets) {
    return compare("rank_offsets", -1, attention.rank_offsets, expected.rank_offsets, findings);
  }
  const auto check = [&](const char* field, const Flat& got, const Flat& want) {
    if (std::equal(got.begin(), got.end(), want.begin())) [[likely]]
      return;
    for (std::int32_t r = 0; r < world && !findings.full(); ++r) {
      compare(field, r, values_of(expected, got, r), values_of(expected, want, r), findings);
    }
  };
  if (!std::equal(attention.shard.begin(), attention.shard.end(), expected.shard.begin())) {
    check("shard", Flat(attention.shard.begin(), attention.shard.end()),
          Flat(expected.shard.begin(), expected.shard.end()));
  }
  check("q_begin", attention.q_begin, expected.q_begin);
  check("q_len", attention.q_len, expected.q_len);
  check("kv_row", attention.kv_row, expected.kv_row);
  check("kv_len", attention.kv_len, expected.kv_len);
  compare("max_seqlen_q", -1, attention.max_seqlen_q, expected.max_seqlen_q, findings);
  compare("max_seqlen_kv", -1, attention.max_seqlen_kv, expected.max_seqlen_kv, findings);
}

void check_attention(const AttnLayout& attention, const PlanIndex& index, Findings& findings) {
  const SparseAttnLayout expected = expect(index);
  const std::int32_t world = index.plan->world_size;
  const bool per_query = index.plan->kv_layout == KvLayout::per_query;
  std::vector<std::int64_t> counts;
  for (std::int32_t r = 0; r < world; ++r)
    counts.push_back(expected.rank_offsets[r + 1] - expected.rank_offsets[r]);
  const auto check_vector = [&](const char* field, const IndexArray& array, Values values) {
    check_dtype(attention_table, field, array, DType::int64, "attention layout", findings);
    if (!check_shape(attention_table, field, array, {world}, findings)) return;
    compare(field, -1, IndexReader(array).span(), values, findings);
  };
  check_vector("max_seqlen_q", attention.max_seqlen_q, expected.max_seqlen_q);
  check_vector("max_seqlen_kv", attention.max_seqlen_kv, expected.max_seqlen_kv);
  check_vector("num_local_seqs_recv", attention.num_local_seqs_recv, counts);
  const auto check = [&](const char* field, const std::vector<IndexArray>& arrays, bool wanted,
                         const Flat& values, bool sums) {
    check_arrays(field, arrays, wanted, expected, values, sums, findings);
  };
  check("cu_seqlens_q", attention.cu_seqlens_q, true, expected.q_len, true);
  check("cu_seqlens_kv", attention.cu_seqlens_kv, per_query, expected.kv_len, true);
  check("kv_row", attention.kv_row, !per_query, expected.kv_row, false);
  check("kv_len", attention.kv_len, !per_query, expected.kv_len, false);
}

}  // namespace waybill::validation
