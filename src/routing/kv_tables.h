#pragma once

#include "homes.h"
#include "kv_groups.h"
#include "waybill/routing/sparse_metadata.h"

namespace waybill::detail {

/// Writes the forward and the reverse metadata of KV, without the counts of the reverse. Every
/// place is known beforehand, so the result does not depend on the number of threads.
void write_kv_tables(const QkvPlan& plan, const Homes& homes, const KvGroups& kv, int num_threads,
                     SparseMetadata& fwd, SparseMetadata& rev);

}  // namespace waybill::detail
