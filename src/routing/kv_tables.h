#pragma once

#include "homes.h"
#include "kv_groups.h"
#include "waybill/routing/sparse_metadata.h"

namespace waybill::detail {

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
