#pragma once

#include <cstdint>
#include <span>

#include "schedule/network_phase.h"
#include "schedule/node_rows.h"
#include "waybill/core/topology.h"

namespace waybill {

/// A part of the workspace of experts (ExpertWorkspaceLayout) of which rows go to the ranks of this
/// one's local index on the other nodes. Every rank has the same parts at the same addresses.
struct WorkspacePart {
  std::int64_t from_bytes = 0;       ///< of the sender's workspace: what node 0 gets
  std::int64_t from_node_bytes = 0;  ///< on to what the next node gets; 0: all nodes get the same
  std::int64_t to_bytes = 0;         ///< of the receiver's workspace: what node 0 sends
  std::int64_t to_node_bytes = 0;    ///< on to what the next node sends
  std::int64_t row_bytes = 0;
};

/// What `rank` sends and receives in one step of a call of experts, for a wire that the host must
/// tell (NCCL): one phase, without waits.
///
/// @param rows of each part, the first ones of a slice. What two ranks say of each other agrees; a
///   pair without rows exchanges nothing
/// @param first_slot slot first_slot + p is raised when all parts of peer p have come
/// @param meets a call begins: all ranks of other nodes say that they have come
[[nodiscard]] NetworkPhase workspace_phase(const Topology& topology, std::int32_t rank,
                                           std::span<const WorkspacePart> parts,
                                           const NodeRows& rows, std::int32_t first_slot,
                                           bool meets);

}  // namespace waybill
