#pragma once

#include <cstdint>
#include <vector>

#include "waybill/core/table_allocator.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// A run of consecutive KV shards of one document that lies on one rank in one piece.
struct KvGroup {
  std::int32_t rank;       ///< attention rank
  std::int32_t first;      ///< position in the document
  std::int32_t last;       ///< position in the document, inclusive
  std::int32_t doc_begin;  ///< of its document in doc_shards
  std::int32_t number;     ///< among the groups of its document
  std::int64_t context;    ///< document rows before it
  std::int64_t rows;       ///< of its shards together
  std::int64_t to_row;     ///< from rows of the document to rows of the rank's KV buffer
};

/// A group as its rank's KV buffer sees it; small, since buffers are written in the order of ranks.
struct KvRun {
  std::int32_t begin;   ///< first shard, an index into doc_shards
  std::int32_t count;   ///< shards
  std::int32_t number;  ///< of the group, among those of its document
  std::int32_t group;
};

/// What the shards and documents of a plan say about KV, ready to be written out.
struct KvGroups {
  UninitializedVector<KvGroup> groups;            ///< document by document
  UninitializedVector<std::int32_t> query_group;  ///< [N] by shard: group that its queries read
  UninitializedVector<std::int64_t> context;      ///< [N] by shard: document rows before it
  UninitializedVector<std::int64_t> window;       ///< [N] by shard: document rows before its window
  /// [N + 1]: copies of each shard, as SparseMetadata::copy_offsets.
  UninitializedVector<std::int64_t> copy_offsets;
  std::vector<std::int64_t> doc_offsets;  ///< [D + 1]: groups of a document
  UninitializedVector<KvRun> runs;        ///< rank by rank, in the order of its KV buffer
  std::vector<std::int64_t> rank_runs;    ///< [W + 1]: runs of a rank
  std::vector<std::int64_t> rank_slots;   ///< [W]: KV shards on the rank
};

/// Forms the groups of a checked plan. Copies of a shard are numbered in the order of the groups.
void form_kv_groups(const QkvPlan& plan, KvGroups& result);

}  // namespace waybill::detail
