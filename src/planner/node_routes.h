#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "waybill/core/topology.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/metadata.h"

namespace waybill::detail {

/// One of the links of a rank.
struct LinkField {
  const char* name;
  std::int64_t LinkBytes::*bytes;
  bool network;
  bool out;
};
inline constexpr LinkField link_fields[] = {{"nvlink_in", &LinkBytes::nvlink_in, false, false},
                                            {"nvlink_out", &LinkBytes::nvlink_out, false, true},
                                            {"network_in", &LinkBytes::network_in, true, false},
                                            {"network_out", &LinkBytes::network_out, true, true}};

/// The rank of `node` with the local index of `rank`; the last node may have fewer ranks.
[[nodiscard]] inline std::int32_t rank_on_node(const Topology& nodes, std::int32_t rank,
                                               std::int32_t node) {
  const std::int32_t first = node * nodes.ranks_per_node;
  const std::int32_t size = std::min(nodes.ranks_per_node, nodes.world_size - first);
  return first + rank % nodes.ranks_per_node % size;
}

/// The one way over nodes: calls visit(src, dst, is_forwarded, forwards) for every hop of the rows
/// of a shard. To ranks of the home's node, and to a node of which one rank alone needs the rows,
/// they go straight; to any other node once, to the rank with the home's local index, which
/// forwards them. `is_forwarded`: src got them by the last hop that is not. `forwards`: dst hands
/// them on.
/// @param ranks who needs the rows; those of a node adjacent, ascending; a rank again for each copy
template <class Visit>
void route_once_per_node(const Topology& nodes, std::int32_t home,
                         std::span<const std::int32_t> ranks, Visit&& visit) {
  for (std::size_t first = 0; first < ranks.size();) {
    const std::int32_t node = ranks[first] / nodes.ranks_per_node;
    std::size_t last = first;
    while (last < ranks.size() && ranks[last] / nodes.ranks_per_node == node) ++last;
    const bool crosses = node != home / nodes.ranks_per_node;
    std::int32_t from = home;
    if (crosses) {
      const bool several = ranks[first] != ranks[last - 1];
      from = several ? rank_on_node(nodes, home, node) : ranks[first];
      visit(home, from, false, several);
    }
    for (const std::int32_t rank : ranks.subspan(first, last - first)) {
      if (rank != from) visit(from, rank, crosses, false);
    }
    first = last;
  }
}

/// The one check of a hop of a relay schedule: ranks, shard and rows are in range, and whoever
/// sends them has them. Hops before `idx` are right. What hops together bring, and their stages,
/// are the caller's to compare.
/// @param num_rows,home [N] of what hops forward: the shards of a plan, or the entries of metadata
/// @return what the hop does not keep, to follow "expected"; null: nothing
[[nodiscard]] const char* wrong_with_hop(std::span<const RelayHop> hops, std::size_t idx,
                                         std::int32_t world_size,
                                         std::span<const std::int64_t> num_rows,
                                         std::span<const std::int32_t> home);

/// The same for all hops. @throws InvalidArgument naming the first that is wrong
void check_hops(const char* who, std::span<const RelayHop> hops, std::int32_t world_size,
                std::span<const std::int64_t> num_rows, std::span<const std::int32_t> home);

/// Adds what rows cost the two ranks between which they travel, inside a node or between nodes.
inline void add_bytes(std::span<LinkBytes> links, bool is_in_node, std::int32_t src,
                      std::int32_t dst, std::int64_t num_bytes) {
  std::int64_t& out = is_in_node ? links[src].nvlink_out : links[src].network_out;
  std::int64_t& in = is_in_node ? links[dst].nvlink_in : links[dst].network_in;
  out += num_bytes;
  in += num_bytes;
}

/// Whether receivers should forward, as a dispatcher decides it (RelayUse::automatic): signals for
/// what is forwarded cost more than a tenth of the limit of the links is worth.
[[nodiscard]] inline bool relay_pays(double relay_seconds, double direct_seconds) {
  return relay_seconds <= 0.9 * direct_seconds;
}

/// The bytes of the same rows on their way back.
[[nodiscard]] inline LinkBytes reversed(const LinkBytes& links) {
  return {links.nvlink_out, links.nvlink_in, links.network_out, links.network_in};
}

/// Adds rank by rank.
inline void add_links(std::span<LinkBytes> sums, std::span<const LinkBytes> links) {
  for (std::size_t r = 0; r < sums.size(); ++r) {
    for (const LinkField& link : link_fields) sums[r].*link.bytes += links[r].*link.bytes;
  }
}

}  // namespace waybill::detail

namespace waybill {

/// How rows with several destinations cross between nodes once. `shard` of a hop counts the entries
/// of the metadata.
///
/// To ranks of the home's node, and to a node of which one rank alone needs the rows, they go
/// straight. To another node of which several ranks need them they go once, to the rank with the
/// home's local index, which forwards them over NVLink; it may be one that does not need them
/// itself and passes them on. Entries without a destination in another node have no hops.
/// @param row_bytes of all tensors that go this way, for `links`: all traffic of the metadata, also
///   that of entries without hops
/// @param once false: the same entries, straight from home to every rank
/// @throws InvalidArgument for a topology whose check() does or of another world size
[[nodiscard]] RelaySchedule route_over_nodes(const SparseMetadata& metadata,
                                             const Topology& topology, std::int64_t row_bytes,
                                             bool once = true);

/// Adds what a hop costs its ranks.
void add_hop(std::span<LinkBytes> links, const Topology& topology, std::int32_t src_rank,
             std::int32_t dst_rank, std::int64_t num_bytes);

/// The least time in which these bytes can cross: of all ranks and both directions the largest,
/// NVLink and network apart.
[[nodiscard]] double limit_seconds(std::span<const LinkBytes> links, double nvlink_bytes_per_second,
                                   double network_bytes_per_second);

}  // namespace waybill
