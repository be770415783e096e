#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "waybill/planner/relay.h"

namespace waybill::detail {

/// What hops forward: the shards of a plan, or the entries of metadata.
struct RelayedShards {
  std::int32_t world_size = 0;
  std::span<const std::int64_t> num_rows;  ///< [N]
  std::span<const std::int32_t> home;      ///< [N] rank
};

/// The one check of a hop of a relay schedule: ranks, shard and rows are in range, and whoever
/// sends them has them. Hops before `idx` are right. What hops together bring, and their stages,
/// are the caller's to compare.
/// @return what the hop does not keep, to follow "expected"; null: nothing
[[nodiscard]] const char* wrong_with_hop(std::span<const RelayHop> hops, std::size_t idx,
                                         const RelayedShards& shards);

}  // namespace waybill::detail
