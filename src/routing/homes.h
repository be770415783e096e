#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "waybill/core/table_allocator.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// Where the shards of a plan live in the MLP layout.
struct Homes {
  UninitializedVector<std::int32_t> rank;   ///< [N]
  UninitializedVector<std::int64_t> begin;  ///< [N]: first row at home
  std::vector<std::int64_t> rank_rows;      ///< [W]
};

/// The rank that each shard (or entry) belongs to. [N]
/// @param rank_offsets [W + 1]: rank w has shards [o[w], o[w + 1])
[[nodiscard]] inline std::vector<std::int32_t> homes_of(
    std::span<const std::int64_t> rank_offsets) {
  if (rank_offsets.empty()) return {};
  std::vector<std::int32_t> homes(rank_offsets.back());
  for (std::size_t w = 0; w + 1 < rank_offsets.size(); ++w) {
    std::fill(homes.begin() + rank_offsets[w], homes.begin() + rank_offsets[w + 1],
              static_cast<std::int32_t>(w));
  }
  return homes;
}

inline void find_homes(const QkvPlan& plan, Homes& homes) {
  homes.rank.resize(plan.num_shards());
  homes.begin.resize(plan.num_shards());
  homes.rank_rows.resize(plan.world_size);
  for (std::int32_t w = 0; w < plan.world_size; ++w) {
    std::int64_t rows = 0;
    for (std::int64_t s = plan.rank_shard_offsets[w]; s < plan.rank_shard_offsets[w + 1]; ++s) {
      homes.rank[s] = w;
      homes.begin[s] = rows;
      rows += plan.shard_len[s];
    }
    homes.rank_rows[w] = rows;
  }
}

}  // namespace waybill::detail
