#pragma once

#include <cstdint>
#include <optional>

#include "waybill/core/index_array.h"

namespace waybill {

/// What a rank must know of a dispatch to combine. Attributes, shapes and dtypes as in
/// Triton-distributed (int32 but for the two maps, which are int64), all filled, -1 where an entry
/// has no meaning. N nodes, M = max_tokens, K = topk, R rows received.
///
/// Where Triton-distributed is wrong, this is right: skipped_token_topk_mapping_indices holds each
/// topk slot's own row (there: the first one's, again and again), and nothing is left undefined.
struct EPAll2AllLayoutDesc {
  std::int64_t num_dispatch_token_cur_rank = 0;  ///< tokens that this rank dispatched
  IndexArray num_input_tokens_per_rank;          ///< [W]
  /// [N, 2, M]: the runs of tokens that the rank of the same local index on each other node sent
  /// here; starts, then ends. None on one node.
  std::optional<IndexArray> send_reqs_recv_tensor;
  /// Expert ids: [T, K] of this rank on one node; else [N, M, K], those of the ranks of the same
  /// local index. A dropped topk slot is num_experts.
  IndexArray topk_indices_tensor;
  /// [N, M, K]: row, on the rank of its expert, of each topk slot of the ranks of the same local
  /// index. Topk slots for another node are known there alone, unless the caller gave scatter
  /// indices.
  IndexArray token_dst_scatter_idx;
  /// [R]: row to the first row of the same token here. One node and grouped rows only; -1 for
  /// padding.
  std::optional<IndexArray> skipped_token_mapping_indices;
  /// [R, K]: of a first row, the rows of the token's topk slots that are here. One node and grouped
  /// rows only.
  std::optional<IndexArray> skipped_token_topk_mapping_indices;

  // What Triton-distributed does not have.
  IndexArray recv_expert_counts;  ///< [P]: rows of each local expert, without padding
  IndexArray
      recv_expert_offsets;  ///< [P + 1]: first rows, with padding; the sizes of a grouped GEMM
  /// Compact rows only: [R, K] local expert of each topk slot that is here, -1 else.
  std::optional<IndexArray> recv_topk_indices;
  /// Compact rows only: [R, K] place of each topk slot that is here in the grouped order, -1 else.
  std::optional<IndexArray> compact_to_grouped;
  /// Compact rows only: [recv_expert_offsets[P]] place in the grouped order to compact row, -1 for
  /// padding.
  std::optional<IndexArray> grouped_to_compact;
};

/// Triton-distributed's name.
using EPAllToAllLayoutDesc = EPAll2AllLayoutDesc;

}  // namespace waybill
