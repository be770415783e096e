#pragma once

#include <cstdint>
#include <vector>

#include "homes.h"
#include "waybill/core/table_allocator.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// A run of consecutive KV shards of one document that lies on one rank in one piece.
struct KvGroup {
  std::int32_t rank;       ///< attention rank
  std::int32_t first;      ///< position in the document
  std::int32_t last;       ///< position in the document, inclusive
  std::int32_t doc_begin;  ///< its document in doc_shards
  std::int32_t number;     ///< among the groups of its document
  std::int64_t context;    ///< document rows before it
  std::int64_t rows;       ///< rows of its shards together
  std::int64_t to_row;     ///< from rows of the document to rows of the rank's KV buffer
};

/// A group as its rank's KV buffer sees it; small, since buffers are written in the order of ranks.
struct KvRun {
  std::int32_t begin;   ///< first shard, an index into doc_shards
  std::int32_t count;   ///< shards
  std::int32_t number;  ///< place of the group among those of its document
  std::int32_t group;
};

/// The KV groups of a plan, ready to be written out.
struct KvGroups {
  UninitializedVector<KvGroup> groups;            ///< document by document
  UninitializedVector<std::int32_t> query_group;  ///< [N] by shard: group that its queries read
  UninitializedVector<std::int64_t> context;      ///< [N] by shard: document rows before it
  UninitializedVector<std::int64_t> window;       ///< [N] by shard: document rows before its range
  UninitializedVector<std::int64_t>
      range_end;  ///< [N] by shard: document rows up to its range's end
  /// [N] by shard, per_query alone: position of the first query that it serves, copy 0.
  UninitializedVector<std::int32_t> first_query;
  /// [N + 1]: copies of each shard, as SparseMetadata::copy_offsets.
  UninitializedVector<std::int64_t> copy_offsets;
  std::vector<std::int64_t> doc_offsets;  ///< [D + 1]: groups of a document
  UninitializedVector<KvRun> runs;        ///< rank by rank, in the order of its KV buffer
  std::vector<std::int64_t> rank_runs;    ///< [W + 1]: runs of a rank
  std::vector<std::int64_t> rank_slots;   ///< [W]: KV shards on the rank
};

/// Forms the groups of a checked plan. Copies of a shard are numbered in the order of the groups.
void form_kv_groups(const QkvPlan& plan, KvGroups& result);

/// A shard as the KV tables see it.
struct KvRow {
  std::int64_t len;
  std::int64_t end;      ///< document rows up to the shard, itself included
  std::int64_t begin;    ///< first row at home
  std::int64_t plane;    ///< rows of the home rank: copies lie that far apart
  std::int32_t home;     ///< rank
  std::int32_t run_end;  ///< first later shard with another home
};

/// The shards in document order, so that a group reads them in one run. [N]
using KvRows = UninitializedVector<KvRow>;

/// Writes the forward and the reverse metadata of KV, without the counts of the reverse. Every
/// place is known beforehand, so the result does not depend on the number of threads. `rows` is
/// memory to work in.
void write_kv_tables(const QkvPlan& plan, const Homes& homes, const KvGroups& kv, int num_threads,
                     KvRows& rows, SparseMetadata& fwd, SparseMetadata& rev);

}  // namespace waybill::detail
