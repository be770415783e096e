#pragma once

#include "../network/path_params.h"
#include "moe_params.h"

namespace waybill::cuda {

/// The ids of this rank's tokens as they go to other nodes.
struct NodeIdsParams {
  MoeShape shape;
  const void* ids;  ///< [T, K]
  bool wide_ids;
  std::int32_t dropped_id;
  std::int32_t* out;  ///< [M, K]: num_experts when dropped, -1 where there is no token
  FaultSink sink;
  const MoeState* state;
};

/// One part of the workspace that goes to the ranks of this one's local index on the other nodes.
struct NodePart {
  std::int64_t from;             ///< byte of this rank's workspace: what node 0 gets
  std::int64_t from_node_bytes;  ///< on to what the next node gets; 0: all get the same
  std::int64_t to;               ///< byte of the receiver's workspace
  std::int64_t row_bytes;
  std::int64_t total_bytes;  ///< to each
};
inline constexpr int max_node_parts = 2;

/// Which rows of the parts go to a node.
enum class NodeFilter : std::uint8_t {
  all,
  tokens,        ///< row t, if token t of `ids` [M, K] has a topk slot there
  partial_sums,  ///< row t, if token t of that node's `ids` [nodes, M, K] has a topk slot here
};

/// A network path's program, to be written: a step for each other node, from the next one on.
struct PathProgram {
  PathState* state;
  std::int32_t* num_puts;
  NetworkStep* steps;
  NetworkPut* puts;
  BatchSlot* waits;
  BatchSlot* signals;
};

/// What this rank puts on other nodes in one network path of a call.
struct ListPutsParams {
  MoeArrive m;
  MoeShape shape;
  std::int32_t begins;  ///< kind of the call that begins with this network path (0: dispatch, 1:
                        ///< combine); -1: it has begun, and its epoch is counted
  NodeFilter filter;
  const std::int32_t* ids;
  std::int32_t num_parts;  ///< 0: it only says that the call has begun
  NodePart parts[max_node_parts];
  std::int32_t first_signal;  ///< slot first_signal + rank is raised at each peer
  PathProgram out;
};

/// A wait for other ranks, between kernels.
struct WaitNodesParams {
  MoeArrive m;
  MoeShape shape;
  std::int32_t begins;         ///< as in ListPutsParams; not -1: all ranks must have entered
  bool counts;                 ///< and then the call is counted
  const std::uint64_t* slots;  ///< [W]: those that peers on other nodes raise; null: none
};

/// Runs of tokens that the ranks of this one's local index sent here, see node_send_requests.
struct NodeRunsParams {
  MoeShape shape;
  const std::int32_t* ids;  ///< [nodes, M, K]
  std::int32_t* runs;       ///< [nodes, 2, M]
};

/// Sums of nodes into the result.
struct AddPartialSumsParams {
  MoeShape shape;
  std::int64_t row_bytes;
  const std::int32_t* ids;        ///< [M, K], of this rank's tokens
  const std::byte* partial_sums;  ///< [nodes, M] rows: what the other nodes sent
  const std::byte* own_share;     ///< [M] rows
  const std::byte* biases[2];
  std::byte* output;
};

}  // namespace waybill::cuda
