#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace waybill {

/// Rows that a rank sends to, and receives from, the rank of its local index on each node. Both
/// ends of a pair know the same numbers, as both have the ids that they follow from.
struct NodeRows {
  std::vector<std::int32_t> sent;      ///< [nodes]; 0 to the own one
  std::vector<std::int32_t> received;  ///< [nodes]
};

/// Topk slots of the tokens that a rank forwards: its own, and those of the ranks of its local
/// index on the other nodes.
struct ForwardedIds {
  std::span<const std::int32_t>
      ids;  ///< [nodes, max_tokens, topk]; dropped, or no token: of no node
  std::int32_t num_nodes = 1;
  std::int32_t own_node = 0;
  std::int64_t max_tokens = 0;
  std::int32_t topk = 1;
  std::int32_t experts_per_node = 1;
};

/// Tokens of slice `slice` that have a topk slot on `node`, in order.
[[nodiscard]] std::vector<std::int32_t> tokens_for_node(const ForwardedIds& of, std::int32_t slice,
                                                        std::int32_t node);

/// Of a dispatch in which a token goes once to each node where it has a topk slot. A combine
/// returns as many: returned_rows().
[[nodiscard]] NodeRows count_node_rows(const ForwardedIds& of);

/// The same where nobody on the host knows the counts.
[[nodiscard]] NodeRows whole_slices(std::int32_t num_nodes, std::int32_t own_node,
                                    std::int64_t max_tokens);

/// The way back.
[[nodiscard]] inline NodeRows returned_rows(NodeRows rows) {
  std::swap(rows.sent, rows.received);
  return rows;
}

}  // namespace waybill
