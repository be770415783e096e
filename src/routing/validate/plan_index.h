#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "findings.h"
#include "send_table.h"
#include "waybill/core/table_allocator.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::validation {

/// Checks every rule that QkvPlan states. False: an index of it must not be built.
[[nodiscard]] bool check_plan(const QkvPlan& plan, Findings& findings);

/// A plan seen from its documents and from the attending ranks. A place is an index into
/// doc_shards: documents back to back, each in the order of its tokens.
struct PlanIndex {
  const QkvPlan* plan = nullptr;
  UninitializedVector<std::int32_t> document;  ///< [N] by place
  UninitializedVector<std::int32_t> home;      ///< [N] by shard: rank that holds it
  UninitializedVector<std::int32_t> kv_first;  ///< [N] by place: place of the first needed KV shard
  UninitializedVector<std::int32_t> kv_last;   ///< [N] by place: place of the last needed KV shard
  UninitializedVector<std::int64_t> rows_before;  ///< [N + 1] by place: rows of all places before
  std::vector<std::int64_t> rank_offsets;         ///< [W + 1]: queries by attending rank
  /// [N]: places of the queries of each rank, in the order of the groups of its KV buffer.
  UninitializedVector<std::int32_t> queries;

  [[nodiscard]] std::int32_t shard(std::int64_t place) const { return plan->doc_shards[place]; }
  [[nodiscard]] std::int64_t rows(std::int64_t first, std::int64_t last) const {
    return rows_before[last + 1] - rows_before[first];
  }
  [[nodiscard]] std::span<const std::int32_t> queries_of(std::int32_t rank) const {
    return {queries.data() + rank_offsets[rank], queries.data() + rank_offsets[rank + 1]};
  }
  /// "shard 3 of rank 5"
  [[nodiscard]] std::string describe(std::int64_t place) const;
};

[[nodiscard]] PlanIndex index_plan(const QkvPlan& plan);

/// The KV rows that one query reads, and those that it adds to the buffer of its rank.
struct KvStep {
  std::int32_t query;      ///< place
  std::int64_t kv_row;     ///< first row of its context in the buffer
  std::int64_t kv_len;     ///< rows of its context
  std::int64_t new_first;  ///< places new_first..new_last follow in the buffer; none if it is less
  std::int64_t new_last;
};

/// Walks one rank's KV buffer as it must be, query by query in the order of the groups, and calls
/// step(const KvStep&). Returns the rows of the buffer.
template <class Step>
std::int64_t walk_kv(const PlanIndex& index, std::int32_t rank, Step&& step) {
  const bool share = index.plan->kv_layout == KvLayout::per_rank;
  std::int32_t document = -1;
  std::int64_t row = 0;           // rows of the buffer so far
  std::int64_t interval = 0;      // first place of the current run of places in the buffer
  std::int64_t interval_row = 0;  // its row
  std::int64_t next = 0;          // the place after that run
  for (const std::int32_t query : index.queries_of(rank)) {
    const std::int64_t first = index.kv_first[query];
    const std::int64_t last = index.kv_last[query];
    // Along a document windows never move back, so a run is continued or left for good.
    if (!share || index.document[query] != document || first > next) {
      document = index.document[query];
      interval = first;
      interval_row = row;
      next = first;
    }
    step(KvStep{.query = query,
                .kv_row = add_rows(interval_row, index.rows(interval, first - 1)),
                .kv_len = index.rows(first, last),
                .new_first = next,
                .new_last = last});
    row = add_rows(interval_row, index.rows(interval, last));
    next = last + 1;
  }
  return row;
}

/// No rank needs more rows than the capacities; -1: any.
void check_plan_capacity(const PlanIndex& index, const ValidateOptions& options,
                         Findings& findings);

/// False, and a finding, unless the entries of a forward table are the shards of the plan: shard j
/// of a rank is its entry j, with the same length; further entries are padding.
[[nodiscard]] bool check_entries(const SendTable& table, const PlanIndex& index,
                                 Findings& findings);

/// Queries go where the plan says, and land in the global order. After check_lines and
/// check_tiling.
void check_queries(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                   Findings& findings);

/// Every query meets exactly the KV shards that its mask asks for, in document order, and no
/// buffer holds others. After check_lines.
void check_causality(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                     Findings& findings);

/// KvLayout::per_rank: the copies of a shard are numbered by the last query of the document on
/// the rank that holds them, last first. After check_lines.
void check_copy_order(const SendTable& table, const PlanIndex& index, Findings& findings);

/// The attention layout of a plan, sparse and dense.
void check_attention(const SparseAttnLayout& attention, const PlanIndex& index, Findings& findings);
void check_attention(const AttnLayout& attention, const PlanIndex& index, Findings& findings);

}  // namespace waybill::validation
