#pragma once

#include <cstdint>
#include <vector>

#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/sparse_metadata.h"

namespace waybill {

/// One sequence of a kernel for variable lengths: its queries and its keys, in rows. Under a causal
/// mask the last query is the last key.
struct VarlenSequence {
  std::int64_t q_begin = 0;
  std::int64_t q_len = 0;
  std::int64_t kv_begin = 0;
  std::int64_t kv_len = 0;

  friend bool operator==(const VarlenSequence&, const VarlenSequence&) = default;
};

struct RowRange {
  std::int64_t begin = 0;
  std::int64_t rows = 0;

  friend bool operator==(const RowRange&, const RowRange&) = default;
};

/// The queries that one rank attends to, and its rows that travel.
struct VarlenRank {
  /// Queries that stay where they are, and so does their context: rows of the rank's own tensors,
  /// in their order. No two overlap, of queries or of keys.
  std::vector<VarlenSequence> in_place;
  /// Queries that were dispatched to this rank, with a context of their own each: rows of its
  /// windows, one after another.
  std::vector<VarlenSequence> dispatched;
  std::vector<RowRange> q_rows;   ///< own rows of Q that are dispatched, in order
  std::vector<RowRange> kv_rows;  ///< own rows of K and V of which there are copies, in order

  friend bool operator==(const VarlenRank&, const VarlenRank&) = default;
};

/// The routing of a plan for kernels of variable lengths, in which rows that stay do not move.
struct VarlenRouting {
  SparseMetadata fwd_q;   ///< an entry per shard; one that stays in place has no destination
  SparseMetadata rev_q;   ///< back, to where the rank's `q_rows` stand one after another
  SparseMetadata fwd_kv;  ///< an entry per shard, a destination for each context that holds it
  SparseMetadata sum_kv;  ///< the same copies, for sums: entries are those of the `kv_rows` alone
  std::vector<VarlenRank> ranks;  ///< [W]

  friend bool operator==(const VarlenRouting&, const VarlenRouting&) = default;
};

/// Neighbouring shards of a document with the same destination are one sequence. Contexts are
/// copied once per sequence, whatever plan.kv_layout says, as kernels take no ranges that overlap.
/// @param in_place false: all rows are dispatched, also those that stay on their rank, so that one
///   call of the kernel serves all.
/// @throws InvalidArgument when plan.check() does.
[[nodiscard]] VarlenRouting compute_varlen_routing(const QkvPlan& plan, bool in_place = true);

}  // namespace waybill
