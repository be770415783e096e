#include "planner/relay_checks.h"

#include "core/to_size.h"

namespace waybill::detail {

const char* wrong_with_hop(std::span<const RelayHop> hops, std::size_t idx,
                           const RelayedShards& shards) {
  const RelayHop& hop = hops[idx];
  const auto in = [](std::int64_t value, std::int64_t end) { return 0 <= value && value < end; };
  if (!in(hop.shard, std::ssize(shards.num_rows))) return "a shard that there is";
  const std::int32_t home = shards.home[hop.shard];
  if (!in(hop.src_rank, shards.world_size) || !in(hop.dst_rank, shards.world_size) ||
      hop.src_rank == hop.dst_rank || hop.dst_rank == home)
    return "two ranks of the world, the second not the rows' home";
  if (hop.num_rows <= 0 || hop.row_begin < 0 ||
      hop.num_rows > shards.num_rows[hop.shard] - hop.row_begin)
    return "rows of the shard";
  if (hop.after < 0) return hop.src_rank == home ? nullptr : "a sender that is the rows' home";
  if (to_size(hop.after) >= idx) return "an earlier hop in `after`";
  const RelayHop& feed = hops[hop.after];
  if (feed.shard != hop.shard || feed.dst_rank != hop.src_rank || feed.row_begin > hop.row_begin ||
      feed.row_begin + feed.num_rows < hop.row_begin + hop.num_rows)
    return "a hop in `after` that brings these rows to the sender";
  return nullptr;
}

}  // namespace waybill::detail
