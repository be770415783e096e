#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "schedule/work.h"
#include "waybill/core/topology.h"

namespace waybill {

/// Rows that a rank sends to, and receives from, the rank of its local index on each node. Both
/// ends of a pair know the same numbers, as both have the ids that they follow from.
struct NodeRows {
  std::vector<std::int32_t> sent;      ///< [nodes]; 0 to the own one
  std::vector<std::int32_t> received;  ///< [nodes]
};

/// All rows of a slice to and from every other node: where nobody on the host knows the counts.
[[nodiscard]] NodeRows whole_slices(std::int32_t num_nodes, std::int32_t own_node,
                                    std::int64_t max_tokens);

/// The way back: a combine returns as many rows as its dispatch sent.
[[nodiscard]] inline NodeRows returned_rows(NodeRows rows) {
  std::swap(rows.sent, rows.received);
  return rows;
}

/// A part of the workspace of experts (ExpertWorkspaceLayout) of which rows go to the ranks of this
/// one's local index on the other nodes. Every rank has the same parts at the same addresses.
struct WorkspacePart {
  std::int64_t from_bytes = 0;       ///< in the sender's workspace: the rows for node 0
  std::int64_t from_node_bytes = 0;  ///< on to the rows for the next node; 0: all get the same
  std::int64_t to_bytes = 0;         ///< in the receiver's workspace: the rows from node 0
  std::int64_t to_node_bytes = 0;    ///< on to the rows from the next node
  std::int64_t row_bytes = 0;
};

/// The messages of `rank` in one step of a call of experts, for a network whose host must name them
/// (NCCL): one phase, without waits.
///
/// @param rows of each part, the first ones of a slice. The counts of both ends of a pair agree; a
///   pair without rows exchanges nothing
/// @param first_slot slot first_slot + p is raised when all parts of peer p have come
/// @param begins a call begins: all ranks of other nodes say that they have come
[[nodiscard]] NetworkPhase workspace_phase(const Topology& topology, std::int32_t rank,
                                           std::span<const WorkspacePart> parts,
                                           const NodeRows& rows, std::int32_t first_slot,
                                           bool begins);

}  // namespace waybill
