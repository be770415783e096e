#pragma once

#include "moe_params.h"

namespace waybill::cuda {

/// The ids of this rank's tokens as they go to other nodes.
struct NodeIdsParams {
  MoeShape shape;
  const void* ids;  ///< [T, K]
  bool wide_ids;
  std::int32_t dropped_id;
  std::int32_t* out;  ///< [M, K]: num_experts when dropped, -1 where there is no token
  MoeHostFaults* faults;
};

/// One array that goes to the ranks of this one's local index on the other nodes.
struct NodeArray {
  const std::byte* from;         ///< what node 0 gets
  std::int64_t from_node_bytes;  ///< on to what the next node gets; 0: all get the same
  std::int64_t to;               ///< bytes from the beginning of the receiver's board
  std::int64_t row_bytes;
  std::int64_t total_bytes;  ///< to each
  std::int32_t word_bytes;   ///< common alignment
};
inline constexpr int max_node_arrays = 3;

/// Which rows of an array go to a node.
enum class NodeFilter : std::uint8_t {
  all,
  tokens,  ///< row t, if token t of `ids` [M, K] has a choice there
  shares,  ///< row t, if token t of that node's `ids` [nodes, M, K] has a choice here
};

/// What this rank sends to the other nodes in one step, and waits for from them.
struct ExchangeParams {
  MoeMeet m;
  MoeShape shape;
  bool is_first;  ///< of the call, which ends with a later kernel; else the call has ended
  NodeFilter filter;
  const std::int32_t* ids;
  std::int32_t num_arrays;
  NodeArray arrays[max_node_arrays];
  const std::uint64_t* own_signals;  ///< [W]: slot r is raised by rank r, to the call's epoch
};

/// The wire between logical nodes whose memory is mapped here: boards and signals of the ranks of
/// this one's local index, by node.
struct PeerWire {
  std::byte* boards[max_gpu_ranks];
  std::uint64_t* signals[max_gpu_ranks];  ///< [W] each
};

/// Runs of tokens that the ranks of this one's local index sent here, see node_send_requests.
struct NodeRunsParams {
  MoeShape shape;
  const std::int32_t* ids;  ///< [nodes, M, K]
  std::int32_t* runs;       ///< [nodes, 2, M]
};

/// Sums of nodes into the result.
struct AddSharesParams {
  MoeShape shape;
  std::int64_t row_bytes;
  const std::int32_t* ids;     ///< [M, K], of this rank's tokens
  const std::byte* shares;     ///< [nodes, M] rows: what the other nodes sent
  const std::byte* own_share;  ///< [M] rows
  const std::byte* biases[2];
  std::byte* output;
};

}  // namespace waybill::cuda
