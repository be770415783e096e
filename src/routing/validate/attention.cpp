#include <algorithm>

#include "plan_index.h"
#include "send_table.h"

namespace waybill::validation {
namespace {

constexpr const char* attention_table = "attention";
using Values = std::span<const std::int64_t>;
using Flat = UninitializedVector<std::int64_t>;

/// The layout as it must be: the received query shards of each rank in the global order.
struct Expected {
  const std::vector<std::int64_t>& rank_offsets;  ///< [W + 1]
  UninitializedVector<std::int32_t> shard;        ///< [N]
  Flat q_begin;
  Flat q_len;
  Flat kv_begin;
  Flat kv_len;
  std::vector<std::int64_t> max_q;   ///< [W]
  std::vector<std::int64_t> max_kv;  ///< [W]

  [[nodiscard]] std::int64_t count(std::int32_t rank) const {
    return rank_offsets[rank + 1] - rank_offsets[rank];
  }
  [[nodiscard]] Values of(const Flat& values, std::int32_t rank) const {
    return std::span(values).subspan(rank_offsets[rank], count(rank));
  }
};

/// What a query reads of its rank's KV buffer.
struct Context {
  std::int64_t row;
  std::int64_t len;
};

UninitializedVector<Context> find_contexts(const PlanIndex& index) {
  UninitializedVector<Context> context(index.plan->shard_len.size());  // by shard
  for (std::int32_t r = 0; r < index.plan->world_size; ++r) {
    walk_kv(index, r, [&](const KvStep& step) {
      context[index.shard(step.query)] = {step.kv_row, step.kv_len};
    });
  }
  return context;
}

/// Whether the layout is as it must be, by one walk in the global order. Sizes are right.
bool matches(const SparseAttnLayout& attention, const PlanIndex& index) {
  const QkvPlan& plan = *index.plan;
  if (attention.rank_offsets != index.rank_offsets) return false;
  const UninitializedVector<Context> context = find_contexts(index);
  struct Progress {
    std::int64_t entry;
    std::int64_t rows = 0;
    std::int64_t max_q = 0;
    std::int64_t max_kv = 0;
  };
  std::vector<Progress> ranks;
  ranks.reserve(plan.world_size);
  for (std::int32_t r = 0; r < plan.world_size; ++r) ranks.push_back({index.rank_offsets[r]});
  bool same = true;
  for (std::size_t s = 0; s < context.size(); ++s) {
    Progress& rank = ranks[plan.q_dst[s]];
    const std::size_t entry = rank.entry++;
    const std::int64_t len = plan.shard_len[s];
    same &= attention.shard[entry] == static_cast<std::int32_t>(s);
    same &= attention.q_begin[entry] == rank.rows;
    same &= attention.q_len[entry] == len;
    same &= attention.kv_begin[entry] == context[s].row;
    same &= attention.kv_len[entry] == context[s].len;
    rank.rows += len;
    rank.max_q = std::max(rank.max_q, len);
    rank.max_kv = std::max(rank.max_kv, context[s].len);
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    same &= attention.max_seqlen_q[r] == ranks[r].max_q;
    same &= attention.max_seqlen_kv[r] == ranks[r].max_kv;
  }
  return same;
}

Expected expect(const PlanIndex& index) {
  const QkvPlan& plan = *index.plan;
  const std::size_t n = plan.shard_len.size();
  const UninitializedVector<Context> context = find_contexts(index);
  Expected result{.rank_offsets = index.rank_offsets,
                  .shard = UninitializedVector<std::int32_t>(n),
                  .q_begin = Flat(n),
                  .q_len = Flat(n),
                  .kv_begin = Flat(n),
                  .kv_len = Flat(n),
                  .max_q = std::vector<std::int64_t>(plan.world_size),
                  .max_kv = std::vector<std::int64_t>(plan.world_size)};
  std::vector<std::int64_t> next(index.rank_offsets.begin(), index.rank_offsets.end() - 1);
  std::vector<std::int64_t> filled(plan.world_size);
  for (std::size_t s = 0; s < n; ++s) {
    const std::size_t r = plan.q_dst[s];
    const std::size_t entry = next[r]++;
    result.shard[entry] = static_cast<std::int32_t>(s);
    result.q_begin[entry] = filled[r];
    result.q_len[entry] = plan.shard_len[s];
    result.kv_begin[entry] = context[s].row;
    result.kv_len[entry] = context[s].len;
    result.max_q[r] = std::max(result.max_q[r], plan.shard_len[s]);
    result.max_kv[r] = std::max(result.max_kv[r], context[s].len);
    filled[r] += plan.shard_len[s];
  }
  return result;
}

void report(const char* field, std::int32_t rank, std::int64_t shard, std::int64_t got,
            std::int64_t expected, Findings& findings) {
  findings.add(FindingKind::attention, attention_table, field, {.rank = rank, .shard = shard}, got,
               expected);
}

/// Compares the values of one rank.
void compare(const char* field, std::int32_t rank, Values got, Values expected,
             Findings& findings) {
  if (std::equal(got.begin(), got.end(), expected.begin(), expected.end())) return;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (got[i] != expected[i]) {
      report(field, rank, static_cast<std::int64_t>(i), got[i], expected[i], findings);
    }
  }
}

/// Compares one value a rank.
void compare_ranks(const char* field, Values got, Values expected, Findings& findings) {
  for (std::size_t r = 0; r < expected.size(); ++r) {
    if (got[r] != expected[r]) {
      report(field, static_cast<std::int32_t>(r), -1, got[r], expected[r], findings);
    }
  }
}

bool check_size(const char* field, std::int64_t got, std::int64_t expected, Findings& findings) {
  if (got == expected) return true;
  findings.add(FindingKind::shape, attention_table, field, {}, concat(got, " values"), expected);
  return false;
}

bool check_sizes(const SparseAttnLayout& attention, std::int64_t world, std::int64_t num_shards,
                 Findings& findings) {
  const auto check = [&](const char* field, const auto& values, std::int64_t expected) {
    return check_size(field, std::ssize(values), expected, findings);
  };
  bool ok = check("rank_offsets", attention.rank_offsets, world + 1);
  ok &= check("shard", attention.shard, num_shards);
  ok &= check("q_begin", attention.q_begin, num_shards);
  ok &= check("q_len", attention.q_len, num_shards);
  ok &= check("kv_begin", attention.kv_begin, num_shards);
  ok &= check("kv_len", attention.kv_len, num_shards);
  ok &= check("max_seqlen_q", attention.max_seqlen_q, world);
  return check("max_seqlen_kv", attention.max_seqlen_kv, world) && ok;
}

/// The arrays of the dense form, one rank at a time.
class DenseAttention {
 public:
  DenseAttention(const AttnLayout& layout, const Expected& expected, std::int32_t world,
                 Findings& findings)
      : layout_(layout), expected_(expected), world_(world), findings_(findings) {}

  void run(KvLayout kv_layout) {
    const bool per_query = kv_layout == KvLayout::per_query;
    std::vector<std::int64_t> counts;
    for (std::int32_t r = 0; r < world_; ++r) counts.push_back(expected_.count(r));
    check_vector("max_seqlen_q", layout_.max_seqlen_q, expected_.max_q);
    check_vector("max_seqlen_kv", layout_.max_seqlen_kv, expected_.max_kv);
    check_vector("num_local_seqs_recv", layout_.num_local_seqs_recv, counts);
    check_sums("cu_seqlens_q", layout_.cu_seqlens_q, expected_.q_len, true);
    check_sums("cu_seqlens_kv", layout_.cu_seqlens_kv, expected_.kv_len, per_query);
    check_lists("kv_begin", layout_.kv_begin, expected_.kv_begin, !per_query);
    check_lists("kv_len", layout_.kv_len, expected_.kv_len, !per_query);
  }

 private:
  void check_vector(const char* field, const IndexArray& array, Values expected) {
    check_dtype(attention_table, field, array, DType::int64, "attention layout", findings_);
    if (!check_shape(attention_table, field, array, {world_}, findings_)) return;
    compare_ranks(field, IndexReader(array).span(), expected, findings_);
  }

  bool check_arrays(const char* field, const std::vector<IndexArray>& arrays, bool wanted) {
    if (!wanted && arrays.empty()) return false;
    return check_size(field, std::ssize(arrays), wanted ? world_ : 0, findings_) && wanted;
  }

  void check_array(const char* field, std::int32_t rank, const IndexArray& array, Values expected) {
    check_dtype(attention_table, field, array, DType::int64, "attention layout", findings_);
    if (array.ndim() != 1 || array.size() != std::ssize(expected)) {
      findings_.add(FindingKind::shape, attention_table, field, {.rank = rank},
                    to_string(array.shape()), concat("[", expected.size(), "]"));
      return;
    }
    compare(field, rank, IndexReader(array).span(), expected, findings_);
  }

  void check_sums(const char* field, const std::vector<IndexArray>& arrays, const Flat& lengths,
                  bool wanted) {
    if (!check_arrays(field, arrays, wanted)) return;
    std::vector<std::int64_t> sums;
    for (std::int32_t r = 0; r < world_ && !findings_.full(); ++r) {
      sums.assign(1, 0);
      for (const std::int64_t len : expected_.of(lengths, r)) {
        sums.push_back(add_rows(sums.back(), len));
      }
      check_array(field, r, arrays[r], sums);
    }
  }

  void check_lists(const char* field, const std::vector<IndexArray>& arrays, const Flat& values,
                   bool wanted) {
    if (!check_arrays(field, arrays, wanted)) return;
    for (std::int32_t r = 0; r < world_ && !findings_.full(); ++r) {
      check_array(field, r, arrays[r], expected_.of(values, r));
    }
  }

  const AttnLayout& layout_;
  const Expected& expected_;
  std::int32_t world_;
  Findings& findings_;
};

}  // namespace

void check_attention(const SparseAttnLayout& attention, const PlanIndex& index,
                     Findings& findings) {
  const std::int32_t world = index.plan->world_size;
  if (!check_sizes(attention, world, index.plan->num_shards(), findings)) return;
  if (matches(attention, index)) [[likely]]
    return;
  const Expected expected = expect(index);
  if (attention.rank_offsets != expected.rank_offsets) {
    for (std::int32_t r = 0; r <= world; ++r) {
      const std::int64_t got = attention.rank_offsets[r];
      if (got == expected.rank_offsets[r]) continue;
      report("rank_offsets", r, -1, got, expected.rank_offsets[r], findings);
    }
    return;
  }
  const auto check = [&](const char* field, const Flat& got, const Flat& want) {
    if (std::equal(got.begin(), got.end(), want.begin())) [[likely]]
      return;
    for (std::int32_t r = 0; r < world && !findings.full(); ++r) {
      compare(field, r, expected.of(got, r), expected.of(want, r), findings);
    }
  };
  if (!std::equal(attention.shard.begin(), attention.shard.end(), expected.shard.begin())) {
    check("shard", Flat(attention.shard.begin(), attention.shard.end()),
          Flat(expected.shard.begin(), expected.shard.end()));
  }
  check("q_begin", attention.q_begin, expected.q_begin);
  check("q_len", attention.q_len, expected.q_len);
  check("kv_begin", attention.kv_begin, expected.kv_begin);
  check("kv_len", attention.kv_len, expected.kv_len);
  compare_ranks("max_seqlen_q", attention.max_seqlen_q, expected.max_q, findings);
  compare_ranks("max_seqlen_kv", attention.max_seqlen_kv, expected.max_kv, findings);
}

void check_attention(const AttnLayout& attention, const PlanIndex& index, Findings& findings) {
  const Expected expected = expect(index);
  DenseAttention(attention, expected, index.plan->world_size, findings).run(index.plan->kv_layout);
}

}  // namespace waybill::validation
