#include "schedule/workspace_phase.h"

namespace waybill {

NetworkPhase workspace_phase(const Topology& topology, std::int32_t rank,
                             std::span<const WorkspacePart> parts, std::int32_t first_slot,
                             bool meets) {
  const std::int32_t ranks = topology.ranks_per_node;
  const std::int32_t own_node = rank / ranks;
  NetworkPhase phase;
  for (std::int32_t k = 1; k < topology.num_nodes(); ++k) {
    const std::int32_t node = (own_node + k) % topology.num_nodes();
    const std::int32_t peer = node * ranks + rank % ranks;
    for (const WorkspacePart& part : parts) {
      const std::int64_t size = part.size_bytes;
      phase.sent.push_back({part.from_bytes + node * part.from_node_bytes, size, peer});
      phase.received.push_back({part.to_bytes + node * size, size, peer});
    }
    if (!parts.empty()) phase.slots.push_back(first_slot + peer);
    if (!meets) continue;
    for (std::int32_t other = node * ranks; other < (node + 1) * ranks; ++other) {
      phase.arrived.push_back(other);
      if (other == peer && !parts.empty()) continue;  // its parts say it
      phase.sent.push_back({0, 0, other});
      phase.received.push_back({0, 0, other});
    }
  }
  return phase;
}

}  // namespace waybill
