#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// The attention layout of all ranks in flat form. Rank r received query shards
/// [rank_offsets[r], rank_offsets[r + 1]), in the global order. Tokens.
struct SparseAttnLayout {
  std::vector<std::int64_t> rank_offsets;     ///< [W + 1]
  UninitializedVector<std::int32_t> shard;    ///< [N]: shard of the plan
  UninitializedVector<std::int64_t> q_begin;  ///< [N]: first row of the shard's queries
  UninitializedVector<std::int64_t> q_len;    ///< [N]
  UninitializedVector<std::int64_t> kv_row;   ///< [N]: first row of its context in the KV buffer
  UninitializedVector<std::int64_t> kv_len;   ///< [N]: rows of its context, itself included
  std::vector<std::int64_t> max_seqlen_q;     ///< [W]
  std::vector<std::int64_t> max_seqlen_kv;    ///< [W]

  friend bool operator==(const SparseAttnLayout&, const SparseAttnLayout&) = default;
};

/// Everything that a step needs: four metadata and the attention layout.
struct QkvRouting {
  KvLayout kv_layout = KvLayout::per_rank;  ///< the plan's
  SparseMetadata fwd_q;                     ///< one destination per entry
  SparseMetadata rev_q;
  SparseMetadata fwd_kv;  ///< one entry per shard, one destination per KV group with it
  SparseMetadata rev_kv;  ///< one destination per entry; planes of the home rank's rows, by copy
  SparseAttnLayout attention;

  friend bool operator==(const QkvRouting&, const QkvRouting&) = default;
};

/// Computes the routing of a plan in time linear in shards, copies and ranks.
///
/// Q: buffers are filled without gaps in the global order. KV, per_query: as compute_metadata_kv.
/// KV, per_rank: one group per document on a rank, in document order, with the KV shards that the
/// document's queries on that rank need, in document order, once. Copies of a shard are numbered
/// by the last query of the rank that holds them, last first; under a causal mask copy c of all
/// shards of a document is on the same rank. Reverse offsets are `copy * T + begin`, as in
/// compute_metadata.
///
/// @param num_threads 0: all cores. The result does not depend on it, bit for bit.
/// @throws InvalidArgument when plan.check() does, or for more than 2^31 - 1 shards.
[[nodiscard]] QkvRouting compute_qkv_routing(const QkvPlan& plan, int num_threads = 1);

/// Computes one routing after another in memory that it keeps, for a plan per step: fetching fresh
/// memory from the system costs more than the computation.
class QkvRouter {
 public:
  QkvRouter();
  ~QkvRouter();
  QkvRouter(QkvRouter&&) noexcept;
  QkvRouter& operator=(QkvRouter&&) noexcept;

  /// As compute_qkv_routing. The result is valid until the next call that does not throw.
  const QkvRouting& compute(const QkvPlan& plan, int num_threads = 1);

  /// Moves the latest result out.
  [[nodiscard]] QkvRouting take();

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

/// The dense form. `reverse` fills seq_recv_mask and recv_seq_lens from `forward`, the metadata it
/// answers, when that has copies. Memory W x (W + 1) + W x S x C.
[[nodiscard]] Metadata to_dense(const SparseMetadata& forward);
[[nodiscard]] Metadata to_dense_reverse(const SparseMetadata& reverse,
                                        const SparseMetadata& forward);

/// The four dense metadata and the ragged attention layout. For the per_query layout they equal
/// what compute_e2e_metadata gives for to_raw_dispatch(plan). For per_rank the attention layout has
/// kv_row and kv_len in place of cu_seqlens_kv.
[[nodiscard]] E2eMetadata to_dense(const QkvRouting& routing);

/// The inverse of to_dense: entries that move nothing are dropped, wherever they stand. One copy a
/// entry where the dense form has no copy axis and every shard with rows has a destination.
/// @throws InvalidArgument when dense.check_shapes() does, for a slice, and for ranks outside
///   -1..W-1 and negative lengths; nothing else is checked: see validate.
[[nodiscard]] SparseMetadata to_sparse(const Metadata& dense);

/// The inverse for everything that was computed from a plan.
/// @throws InvalidArgument as above, and for an attention layout that does not have the plan's
///   number of ranks and received shards.
[[nodiscard]] QkvRouting to_sparse(const QkvPlan& plan, const E2eMetadata& metadata);

/// One sequence of a kernel for variable lengths: its queries and its keys, in rows. Under a causal
/// mask the last query is the last key, unless the queries meet all of the keys.
struct VarlenSequence {
  std::int64_t q_begin = 0;
  std::int64_t q_len = 0;
  std::int64_t kv_begin = 0;
  std::int64_t kv_len = 0;
  bool is_whole = false;  ///< its queries meet all of its keys: its shards have a kv_end

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
  /// in their order. No two overlap, of queries, or of keys if both are whole or neither is.
  std::vector<VarlenSequence> in_place;
  /// Queries that were dispatched to this rank, with a context of their own each: rows of its
  /// windows, one after another: first the whole ones.
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

/// The share of (query, key) pairs whose rows stay; 1 without any.
[[nodiscard]] double in_place_share(const VarlenRouting& routing);

}  // namespace waybill
