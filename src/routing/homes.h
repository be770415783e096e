#pragma once

#include <cstdint>
#include <vector>

#include "waybill/core/at.h"
#include "waybill/core/uninitialized_vector.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// Where the shards of a plan live in the MLP layout.
struct Homes {
  UninitializedVector<std::int32_t> rank;   ///< [N]
  UninitializedVector<std::int64_t> begin;  ///< [N]: first row at home
  std::vector<std::int64_t> rank_rows;      ///< [W]
};

inline void find_homes(const QkvPlan& plan, Homes& homes) {
  homes.rank.resize(at(plan.num_shards()));
  homes.begin.resize(at(plan.num_shards()));
  homes.rank_rows.resize(at(plan.world_size));
  for (std::int32_t w = 0; w < plan.world_size; ++w) {
    std::int64_t rows = 0;
    for (std::int64_t s = plan.rank_shard_offsets[at(w)]; s < plan.rank_shard_offsets[at(w) + 1];
         ++s) {
      homes.rank[at(s)] = w;
      homes.begin[at(s)] = rows;
      rows += plan.shard_len[at(s)];
    }
    homes.rank_rows[at(w)] = rows;
  }
}

}  // namespace waybill::detail
