#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "waybill/core/topology.h"

namespace waybill::detail {

/// A hop of the rows of one shard that cross to each node once.
struct NodeHop {
  std::int32_t src = 0;
  std::int32_t dst = 0;
  bool is_forwarded = false;  ///< src got the rows from their home by the last hop that is not
  bool forwards = false;      ///< dst hands them on inside its node
};

/// The rank of `node` with the local index of `rank`; the last node may have fewer ranks.
[[nodiscard]] inline std::int32_t rank_on_node(const Topology& nodes, std::int32_t rank,
                                               std::int32_t node) {
  const std::int32_t first = node * nodes.ranks_per_node;
  const std::int32_t size = std::min(nodes.ranks_per_node, nodes.world_size - first);
  return first + rank % nodes.ranks_per_node % size;
}

/// The one way over nodes: calls visit(NodeHop) for every hop. To ranks of the home's node, and to
/// a node of which one rank alone needs the rows, they go straight; to any other node once, to the
/// rank with the home's local index, which forwards them.
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
      visit(NodeHop{.src = home, .dst = from, .forwards = several});
    }
    for (const std::int32_t rank : ranks.subspan(first, last - first)) {
      if (rank != from) visit(NodeHop{.src = from, .dst = rank, .is_forwarded = crosses});
    }
    first = last;
  }
}

}  // namespace waybill::detail
