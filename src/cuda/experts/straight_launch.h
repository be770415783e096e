#pragma once

#include <cuda_runtime_api.h>

#include "moe_params.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {

// Several nodes whose memory is mapped, and few tokens: each goes straight to the ranks of its
// experts, as on one node, and the ranks of a token's rows are read straight by its own.

/// Ids and weights to the ranks of this one's local index, which place tokens together.
struct StraightBeginParams {
  MoeArrive m;  ///< all ranks as one node
  MoeShape shape;
  bool counts;      ///< else ids are known
  const void* ids;  ///< [T, K]
  bool wide_ids;
  std::int32_t dropped_id;
  const std::byte* weights;  ///< [T, K] or null
  std::int32_t weight_bytes;
  Peers<std::byte> workspaces;
  std::int64_t ids_offset;  ///< in a workspace: [nodes, M, K]
  std::int64_t weights_offset;
  Peers<std::uint64_t> posted;      ///< [nodes]: raised by the rank of that node
  const std::uint64_t* own_posted;  ///< those of this rank
};

/// Begins a dispatch: all ranks have come, and ids and weights are here.
cudaError_t launch_straight_begin(const StraightBeginParams& params, cudaStream_t stream);

struct StraightCombineParams {
  MoeArrive m;  ///< all ranks as one node
  MoeShape shape;
  const std::int64_t* addresses;   ///< [M, K], ranks of the world
  const std::int32_t* ids;         ///< [M, K]
  Peers<const std::byte> windows;  ///< of all ranks
  const std::byte* lost_row;       ///< NaN, see lost_address
  std::int32_t primary_only;       ///< one row a rank
  std::int64_t row_bytes;
  const std::byte* biases[2];
  const std::byte* weights;  ///< [T, K] or null
  std::byte* output;
};

/// Begins and ends an epoch. Sums each node's rows and rounds them, then biases and nodes: as nodes
/// do that send each other sums. @param wide 16-byte words
cudaError_t launch_straight_combine(const StraightCombineParams& params, DType tokens,
                                    DType weights, bool wide, int blocks, cudaStream_t stream);

cudaError_t prepare_straight(DType tokens, DType weights);

}  // namespace waybill::cuda
