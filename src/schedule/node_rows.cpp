#include "schedule/node_rows.h"

#include <algorithm>

namespace waybill {

std::vector<std::int32_t> tokens_for_node(const ForwardedIds& of, std::int32_t slice,
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

NodeRows count_node_rows(const ForwardedIds& of) {
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

NodeRows whole_slices(std::int32_t num_nodes, std::int32_t own_node, std::int64_t max_tokens) {
  std::vector<std::int32_t> rows(num_nodes, static_cast<std::int32_t>(max_tokens));
  rows[own_node] = 0;
  return {.sent = rows, .received = rows};
}

}  // namespace waybill
