#pragma once

#include <cstdint>

#include "waybill/routing/qkv_plan.h"

namespace waybill::bench {

/// Documents drawn from the first named length distribution until they fill 64K tokens per rank,
/// packed in order into the ranks, and cut into `num_shards` query shards (to 1 %). The shards of a
/// document go to consecutive ranks from a random one on, so that each KV shard has as many
/// destinations as it can have under a causal mask.
[[nodiscard]] QkvPlan spread_plan(std::int32_t world_size, std::int64_t num_shards,
                                  KvLayout kv_layout = KvLayout::per_rank);

/// The same with documents of `shards_per_document` equal shards each.
[[nodiscard]] QkvPlan long_document_plan(std::int32_t world_size, std::int64_t num_shards,
                                         std::int64_t shards_per_document,
                                         KvLayout kv_layout = KvLayout::per_rank);

}  // namespace waybill::bench
