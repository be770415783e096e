#pragma once

#include <cstdint>
#include <optional>

#include "waybill/core/index_array.h"
#include "waybill/routing/metadata.h"

namespace waybill {

/// Which KV shards serve which queries, in DistCA's dense form. W = world_size, S = most
/// shards on a rank, C = most queries that a KV shard serves. All int64.
struct KvMapping {
  IndexArray kv_to_q_mapping;    ///< [W, S, C, 2]: (query rank, query shard); -1, -1 unused
  IndexArray kv_to_q_rank;       ///< [W, S, C]: place among the query's KV shards, -1 unused
  IndexArray kv_context_size;    ///< [W, S]: rows of the document before this KV shard
  IndexArray q_to_num_kv_seq;    ///< [W, S]: KV shards of the query
  IndexArray q_to_num_kv_token;  ///< [W, S]: their rows

  friend bool operator==(const KvMapping&, const KvMapping&) = default;
};

struct KvMetadata {
  Metadata fwd;
  Metadata rev;
  /// [W, S, C], on request: attention rank * R + place in its KV order, -1 unused; R is the most
  /// KV shards on a rank.
  std::optional<IndexArray> kv_dst_global_seq_id;
};

/// Routing of K and V when each query keeps a contiguous copy of its whole context.
///
/// A KV copy goes where its query goes. The destination buffer has one group per query, in the
/// global order of the queries; inside a group the KV shards are in document order. The reverse
/// metadata sends gradients back in that order, to `copy * T + begin` (see compute_metadata).
/// Counts are kept by the KV shard's own rank, which also holds when a document's shards and its
/// queries live on different ranks (DistCA attributes them to the query's rank).
///
/// Tables of any type of integers are taken; those of the result are int64.
/// @param seq_len [W, S]; @param num_seqs [W] or [W, 1]; @param q_dispatch [W, S], -1 none
/// @throws InvalidArgument for wrong shapes, ranks and query indices out of range, negative
///   values, a copy whose query has no destination, and for KV shards that do not tile the context
///   of their query without gap or overlap.
[[nodiscard]] KvMetadata compute_metadata_kv(const KvMapping& mapping, const IndexArray& seq_len,
                                             const IndexArray& num_seqs,
                                             const IndexArray& q_dispatch,
                                             bool return_intermediate = false);

}  // namespace waybill
