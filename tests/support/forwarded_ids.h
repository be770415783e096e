#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "schedule/workspace_phase.h"

// The rows between nodes as they follow from the ids: the specification of `node_rows_kernel`.

namespace waybill::test {

/// Topk slots of the tokens that a rank forwards: its own, and those of the ranks of its local
/// index on the other nodes.
struct ForwardedIds {
  /// [nodes, max_tokens, topk]; a dropped slot, or no token: of no node
  std::span<const std::int32_t> ids;
  std::int32_t num_nodes = 1;
  std::int32_t own_node = 0;
  std::int64_t max_tokens = 0;
  std::int32_t topk = 1;
  std::int32_t experts_per_node = 1;
};

/// Tokens of slice `slice` that have a topk slot on `node`, in order.
inline std::vector<std::int32_t> tokens_for_node(const ForwardedIds& of, std::int32_t slice,
                                                 std::int32_t node) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t token = 0; token < of.max_tokens; ++token) {
    const std::int64_t first = (slice * of.max_tokens + token) * of.topk;
    const auto slots = of.ids.subspan(first, of.topk);
    const bool goes = std::ranges::any_of(
        slots, [&](std::int32_t id) { return id >= 0 && id / of.experts_per_node == node; });
    if (goes) tokens.push_back(static_cast<std::int32_t>(token));
  }
  return tokens;
}

/// The rows of a dispatch in which a token goes once to each node where it has a topk slot.
inline NodeRows count_node_rows(const ForwardedIds& of) {
  NodeRows rows = whole_slices(of.num_nodes, of.own_node, 0);
  for (std::int32_t node = 0; node < of.num_nodes; ++node) {
    if (node == of.own_node) continue;
    const auto sent = tokens_for_node(of, of.own_node, node).size();
    const auto received = tokens_for_node(of, node, of.own_node).size();
    rows.sent[node] = static_cast<std::int32_t>(sent);
    rows.received[node] = static_cast<std::int32_t>(received);
  }
  return rows;
}

}  // namespace waybill::test
