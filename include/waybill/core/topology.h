#pragma once

#include <cstdint>
#include <iosfwd>

#include "waybill/core/error.h"

namespace waybill {

/// A rank of the world, 0..world_size-1. Arrays hold ranks as plain integers, -1 for "none".
enum class Rank : std::int32_t {};

/// A rank's index inside its node, 0..ranks_per_node-1.
enum class LocalRank : std::int32_t {};

/// A node (host, or logical host) of the world.
enum class Node : std::int32_t {};

/// The plain number of a strong index.
template <class Index>
[[nodiscard]] constexpr std::int32_t to_int(Index index) noexcept {
  return static_cast<std::int32_t>(index);
}

std::ostream& operator<<(std::ostream& out, Rank rank);

/// The largest world this library accepts (it bounds tables of world_size entries).
inline constexpr std::int32_t max_world_size = 1 << 20;

/// How the ranks lie on nodes: consecutive ranks share a node. Worlds need as many ranks on
/// each node, see check(); plans and predictions accept a last node with fewer.
struct Topology {
  std::int32_t world_size = 1;
  std::int32_t ranks_per_node = 1;

  /// @throws InvalidArgument unless 1 <= ranks_per_node, and it divides world_size.
  void check() const {
    require(1 <= world_size && world_size <= max_world_size, "Topology: world_size = ", world_size,
            ", expected 1..", max_world_size);
    require(1 <= ranks_per_node && world_size % ranks_per_node == 0,
            "Topology: ranks_per_node = ", ranks_per_node,
            ", expected a divisor of world_size = ", world_size);
  }

  [[nodiscard]] std::int32_t num_nodes() const {
    return (world_size + ranks_per_node - 1) / ranks_per_node;
  }
  [[nodiscard]] Node node(Rank rank) const { return Node{to_int(rank) / ranks_per_node}; }
  [[nodiscard]] bool share_node(Rank a, Rank b) const { return node(a) == node(b); }
  [[nodiscard]] LocalRank local_rank(Rank rank) const {
    return LocalRank{to_int(rank) % ranks_per_node};
  }
};

}  // namespace waybill
