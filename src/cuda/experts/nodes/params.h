#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../network/path_params.h"
#include "../params.h"
#include "schedule/network_program.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {
/// What goes to another node is signalled chunk by chunk: 1 << shift tokens each, at most 32, of at
/// most 128 KiB where one has no more; of few tokens fewer, so that all blocks of a network
/// path have some.
[[nodiscard]] constexpr std::int32_t chunk_shift(std::int64_t row_bytes, std::int64_t max_tokens) {
  constexpr std::int32_t max_shift = 5;
  constexpr std::int64_t max_bytes = max_put_bytes / 2;
  constexpr std::int64_t min_chunks = 32;
  std::int32_t shift = 0;
  while (shift < max_shift && (row_bytes << (shift + 1)) <= max_bytes &&
         (min_chunks << (shift + 1)) <= max_tokens) {
    ++shift;
  }
  return shift;
}

[[nodiscard]] constexpr std::int64_t num_chunks(std::int64_t max_tokens, std::int32_t shift) {
  return (max_tokens + (std::int64_t{1} << shift) - 1) >> shift;
}

/// One part of the workspace that goes to the ranks of this one's local index on the other nodes.
struct NodePart {
  std::int64_t from;  ///< byte of this rank's workspace: what node 0 gets. Also beyond it, where
                      ///< the network path reads any memory of the rank
  std::int64_t from_node_bytes;  ///< on to what the next node gets; 0: all get the same
  std::int64_t to;               ///< byte of the receiver's workspace
  std::int64_t row_bytes;
  std::int64_t total_bytes;  ///< to each, where it goes whole
};
inline constexpr int max_node_parts = 2;

/// Which rows go to a node.
enum class NodeFilter : std::uint8_t {
  none,
  tokens,        ///< row t, if token t of `ids` [M, K] has a topk slot there
  partial_sums,  ///< row t, if token t of that node's `ids` [nodes, M, K] has a topk slot here
};

/// A network path's program, to be written. For each other node, from the next one on, there is a
/// step with what goes whole, if anything does; then, node by node, one for each chunk of tokens.
struct PathProgram {
  PathState* state;
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
  // A dispatch that counts makes the ids of this rank's tokens from those of the caller.
  const void* given_ids;  ///< [T, K], read only where made_ids is set; null if T is 0
  bool wide_ids;
  std::int32_t dropped_id;
  std::int32_t* made_ids;  ///< [M, K]: num_experts when dropped, -1 where there is no token. Null:
                           ///< the call does not count

  NodeFilter filter;
  const std::int32_t* ids;  ///< as made ones; read where made_ids is null
  std::int32_t num_whole;
  NodePart whole[max_node_parts];
  std::int32_t num_parts;  ///< of rows
  NodePart parts[max_node_parts];
  std::int32_t chunk_shift;  ///< a chunk has 1 << chunk_shift tokens
  std::int32_t num_chunks;   ///< of a node
  /// At each peer slot whole_slot + own node is raised by what goes whole, slot chunk_slot +
  /// own node * num_chunks + c by chunk c.
  std::int32_t whole_slot;
  std::int32_t chunk_slot;
  /// Rows of partial sums are made in so many pieces a node, each of so many tokens; 0: those of
  /// nodes behind this one, then those of nodes before it. Each raises a counter of the path.
  std::int32_t ready_pieces;
  std::int32_t piece_tokens;
  PathProgram out;
};

/// A wait for other ranks, between kernels.
struct WaitNodesParams {
  MoeArrive m;
  MoeShape shape;
  std::int32_t begins;         ///< as in ListPutsParams; not -1: all ranks must have entered
  bool of_node;                ///< and these are those of the node alone
  bool counts;                 ///< and then the call is counted
  const std::uint64_t* slots;  ///< that of node 0, which its rank has raised; null: none
  std::int32_t node_stride;    ///< on to that of the next
};

/// Runs of tokens that the ranks of this one's local index sent here, see node_send_requests.
struct NodeRunsParams {
  MoeShape shape;
  const std::int32_t* ids;  ///< [nodes, M, K]
  std::int32_t* runs;       ///< [nodes, 2, M]
};

/// Sums of nodes into the result.
struct AddPartialSumsParams {
  MoeArrive m;
  MoeShape shape;
  ChunkSlots arrived;
  std::int64_t row_bytes;
  const std::int32_t* ids;        ///< [M, K], of this rank's tokens
  const std::byte* partial_sums;  ///< [nodes, M] rows: what the other nodes sent
  const std::byte* own_sums;      ///< [M] rows
  const std::byte* biases[2];
  std::byte* output;
};

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

cudaError_t launch_node_rows(const NodeRowsParams& params, cudaStream_t stream);
/// @param word_bytes common_word of all that it reads and writes
cudaError_t launch_move_node_rows(const MoveNodeRowsParams& params, int word_bytes, int blocks,
                                  cudaStream_t stream);

// What a layer over several nodes does beside the kernels of one node. See launch.h.

/// Loads the kernels of this file.
cudaError_t prepare_nodes(DType tokens);

/// Writes a network path's program, and ids as other nodes read them. Where the call begins it
/// signals that to the ranks of the node.
cudaError_t launch_list_puts(const ListPutsParams& params, cudaStream_t stream);

/// Raises a counter of the network path of the call that is being made: what was queued before is
/// there.
cudaError_t launch_raise_ready(const MoeArrive& arrive, std::uint64_t* ready, cudaStream_t stream);

cudaError_t launch_wait_nodes(const WaitNodesParams& params, cudaStream_t stream);

cudaError_t launch_node_runs(const NodeRunsParams& params, cudaStream_t stream);

/// Biases, then the sums of nodes in their order, in float32, rounded once; waits for those of
/// other nodes as they come. @param wide 16-byte words
cudaError_t launch_add_partial_sums(const AddPartialSumsParams& params, DType dtype, bool wide,
                                    int blocks, cudaStream_t stream);

}  // namespace waybill::cuda
