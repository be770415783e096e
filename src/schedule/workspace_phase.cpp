#include "schedule/workspace_phase.h"

namespace waybill {

NodeRows whole_slices(std::int32_t num_nodes, std::int32_t own_node, std::int64_t max_tokens) {
  std::vector<std::int32_t> rows(num_nodes, static_cast<std::int32_t>(max_tokens));
  rows[own_node] = 0;
  return {.sent = rows, .received = rows};
}

NetworkPhase workspace_phase(const Topology& topology, std::int32_t rank,
                             std::span<const WorkspacePart> parts, const NodeRows& rows,
                             std::int32_t first_slot, bool begins) {
  const std::int32_t ranks = topology.ranks_per_node;
  const std::int32_t own_node = rank / ranks;
  NetworkPhase phase;
  for (std::int32_t k = 1; k < topology.num_nodes(); ++k) {
    const std::int32_t node = (own_node + k) % topology.num_nodes();
    const std::int32_t peer = node * ranks + rank % ranks;
    const std::int64_t sent = parts.empty() ? 0 : rows.sent[node];
    const std::int64_t received = parts.empty() ? 0 : rows.received[node];
    for (const WorkspacePart& part : parts) {
      const std::int64_t from = part.from_bytes + node * part.from_node_bytes;
      const std::int64_t to = part.to_bytes + node * part.to_node_bytes;
      if (sent > 0) phase.sent.push_back({from, sent * part.row_bytes, peer});
      if (received > 0) phase.received.push_back({to, received * part.row_bytes, peer});
    }
    if (!parts.empty()) phase.slots.push_back(first_slot + peer);
    if (!begins) continue;
    for (std::int32_t other = node * ranks; other < (node + 1) * ranks; ++other) {
      phase.arrived.push_back(other);
      // A peer with parts says it by these.
      if (other != peer || sent == 0) phase.sent.push_back({0, 0, other});
      if (other != peer || received == 0) phase.received.push_back({0, 0, other});
    }
  }
  return phase;
}

}  // namespace waybill
