#include "planner/node_routes.h"

#include <algorithm>

#include "routing/homes.h"
#include "waybill/core/error.h"

namespace waybill {
RelaySchedule route_over_nodes(const SparseMetadata& metadata, const Topology& topology,
                               std::int64_t row_bytes, bool once) {
  topology.check();
  require(metadata.world_size == topology.world_size,
          "route_over_nodes: metadata have world_size = ", metadata.world_size,
          ", expected the topology's ", topology.world_size);
  RelaySchedule schedule;
  schedule.links.assign(topology.world_size, {});
  const auto node = [&](std::int32_t rank) { return rank / topology.ranks_per_node; };
  const auto hop = [&](std::int32_t src, std::int32_t dst, std::int64_t entry, std::int32_t after) {
    const std::int64_t rows = metadata.seq_len[entry];
    const std::int32_t stage = after < 0 ? 0 : 1;
    schedule.hops.push_back({.src_rank = src,
                             .dst_rank = dst,
                             .shard = static_cast<std::int32_t>(entry),
                             .stage = stage,
                             .row_begin = 0,
                             .num_rows = rows,
                             .after = after});
    schedule.num_stages = std::max(schedule.num_stages, stage + 1);
    add_hop(schedule.links, topology, src, dst, rows * row_bytes);
    return static_cast<std::int32_t>(schedule.hops.size()) - 1;
  };
  std::vector<std::int32_t> receivers;
  detail::for_each_entry(metadata, [&](std::int32_t home, std::int64_t, std::int64_t entry) {
    if (metadata.seq_len[entry] == 0) return;
    receivers.clear();
    bool leaves_node = false;
    for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
      const std::int32_t dst = metadata.dst_rank[c];
      if (dst == home) continue;
      receivers.push_back(dst);
      leaves_node = leaves_node || node(dst) != node(home);
    }
    if (!leaves_node) {
      for (const std::int32_t dst : receivers)
        add_hop(schedule.links, topology, home, dst, metadata.seq_len[entry] * row_bytes);
      return;
    }
    std::ranges::sort(receivers);
    receivers.erase(std::unique(receivers.begin(), receivers.end()), receivers.end());
    // Farther nodes come in the order from the home's on, so that homes begin with different ones.
    const auto farther = std::ranges::partition_point(
        receivers, [&](std::int32_t rank) { return node(rank) <= node(home); });
    std::rotate(receivers.begin(), farther, receivers.end());
    std::int32_t feed = -1;
    if (!once) {
      for (const std::int32_t dst : receivers) hop(home, dst, entry, -1);
      return;
    }
    detail::route_once_per_node(
        topology, home, receivers,
        [&](std::int32_t src, std::int32_t dst, bool is_forwarded, bool /*forwards*/) {
          const std::int32_t made = hop(src, dst, entry, is_forwarded ? feed : -1);
          if (!is_forwarded) feed = made;
        });
  });
  return schedule;
}

void add_hop(std::span<LinkBytes> links, const Topology& topology, std::int32_t src_rank,
             std::int32_t dst_rank, std::int64_t num_bytes) {
  const bool is_in_node = topology.node(Rank{src_rank}) == topology.node(Rank{dst_rank});
  detail::add_bytes(links, is_in_node, src_rank, dst_rank, num_bytes);
}

double limit_seconds(std::span<const LinkBytes> links, double nvlink_bytes_per_second,
                     double network_bytes_per_second) {
  std::int64_t nvlink = 0;
  std::int64_t network = 0;
  for (const LinkBytes& link : links) {
    nvlink = std::max({nvlink, link.nvlink_in, link.nvlink_out});
    network = std::max({network, link.network_in, link.network_out});
  }
  return std::max(static_cast<double>(nvlink) / nvlink_bytes_per_second,
                  static_cast<double>(network) / network_bytes_per_second);
}

}  // namespace waybill

namespace waybill::detail {

const char* wrong_with_hop(std::span<const RelayHop> hops, std::size_t idx, std::int32_t world_size,
                           std::span<const std::int64_t> num_rows,
                           std::span<const std::int32_t> home) {
  const RelayHop& hop = hops[idx];
  const auto in = [](std::int64_t value, std::int64_t end) { return 0 <= value && value < end; };
  if (!in(hop.shard, std::ssize(num_rows))) return "a shard that there is";
  const std::int32_t origin = home[hop.shard];
  if (!in(hop.src_rank, world_size) || !in(hop.dst_rank, world_size) ||
      hop.src_rank == hop.dst_rank || hop.dst_rank == origin)
    return "two ranks of the world, the second not the rows' home";
  if (hop.num_rows <= 0 || hop.row_begin < 0 || hop.num_rows > num_rows[hop.shard] - hop.row_begin)
    return "rows of the shard";
  if (hop.after < 0) return hop.src_rank == origin ? nullptr : "a sender that is the rows' home";
  if (hop.after >= static_cast<std::int64_t>(idx)) return "an earlier hop in `after`";
  const RelayHop& feed = hops[hop.after];
  if (feed.shard != hop.shard || feed.dst_rank != hop.src_rank || feed.row_begin > hop.row_begin ||
      feed.row_begin + feed.num_rows < hop.row_begin + hop.num_rows)
    return "a hop in `after` that brings these rows to the sender";
  return nullptr;
}

void check_hops(const char* who, std::span<const RelayHop> hops, std::int32_t world_size,
                std::span<const std::int64_t> num_rows, std::span<const std::int32_t> home) {
  for (std::size_t i = 0; i < hops.size(); ++i) {
    const char* const expected = wrong_with_hop(hops, i, world_size, num_rows, home);
    require(expected == nullptr, who, ": relay.hops[", i, "]: ", hops[i].num_rows, " rows from ",
            hops[i].row_begin, " of shard ", hops[i].shard, ", from rank ", hops[i].src_rank,
            " to ", hops[i].dst_rank, ", expected ", expected);
  }
}

}  // namespace waybill::detail
