#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace waybill::cuda {

// Rows that cross between nodes where the host must say how many (NCCL): those that a node needs,
// packed at the front of a slice. See schedule/node_rows.h.

/// Of the tokens that a rank forwards: which of its own go to each node ([0, n]), and which of node
/// n's come here ([1, n]).
struct NodeRowsParams {
  MoeShape shape;
  const std::int32_t* ids;  ///< [nodes, M, K]
  std::int32_t* tokens;     ///< [2, nodes, M]: in order
  std::int32_t* counts;     ///< [2, nodes]
  HostCount* host;          ///< the same, with the ticket
  std::uint64_t ticket;
};

/// Packs rows, or unpacks them.
struct MoveNodeRowsParams {
  MoeShape shape;
  const std::int32_t* tokens;  ///< [nodes, M]: row i of a packed slice is row tokens[i]
  const std::int32_t* counts;  ///< [nodes]
  bool packs;
  const std::byte* from;         ///< of node 0
  std::int64_t from_node_bytes;  ///< on to those of the next
  std::byte* to;
  std::int64_t to_node_bytes;
  std::int64_t row_bytes;
};

cudaError_t prepare_node_rows();
cudaError_t launch_node_rows(const NodeRowsParams& params, cudaStream_t stream);
/// @param word_bytes common_word of all that it reads and writes
cudaError_t launch_move_node_rows(const MoveNodeRowsParams& params, int word_bytes, int blocks,
                                  cudaStream_t stream);

}  // namespace waybill::cuda
