#pragma once

#include "waybill/core/index_array.h"
#include "waybill/routing/compute_metadata_kv.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// A plan in DistCA's dense form, one KV copy per query. P = most shards on a rank. int64.
struct RawQkvDispatch {
  IndexArray cp_seq_lens;    ///< [W, P]: rows of each shard; padding 0
  IndexArray num_cp_shards;  ///< [W]: shards on the rank
  IndexArray cp_query_dst;   ///< [W, P]: destination rank; padding -1
  KvMapping kv;              ///< see KvMapping

  friend bool operator==(const RawQkvDispatch&, const RawQkvDispatch&) = default;
};

/// The dense form of a causal plan (its kv_layout is not looked at: this form is per query).
/// C = most queries that a KV shard serves, or `max_cp_degree` when that is larger.
/// @throws InvalidArgument when plan.check() does, or for a plan with windows (kv_begin).
[[nodiscard]] RawQkvDispatch to_raw_dispatch(const QkvPlan& plan, std::int64_t max_cp_degree = 1);

}  // namespace waybill
