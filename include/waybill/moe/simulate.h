#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/core/index_array.h"
#include "waybill/moe/ep_config.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {

/// The tables of a dispatch that a rank needs to combine. Attributes, shapes and dtypes as in
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

  // Not in Triton-distributed:
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

  // With spare experts alone. Experts in the tables above are then slots, see slot_config: P counts
  // this rank's slots, and a dropped topk slot is the number of all slots.
  std::optional<IndexArray> slot_experts;      ///< [P]: the expert of each slot, -1: it is empty
  std::optional<IndexArray> all_slot_experts;  ///< [W, P]: the same of all ranks
  std::optional<IndexArray> all_slot_quotas;   ///< [W, P]: rows that a slot takes, without padding
};

/// Triton-distributed's name.
using EPAllToAllLayoutDesc = EPAll2AllLayoutDesc;

/// The input of a dispatch of all ranks: one entry per rank.
struct ExpertInputs {
  std::span<const ConstTensorView> tokens;       ///< [T, input_columns] of input_dtype
  std::span<const ConstTensorView> exp_indices;  ///< [T, topk], int32 or int64
  std::span<const ConstTensorView> weights;      ///< none, or [T, topk] of weight_dtype each
  std::span<const ConstTensorView> scales;       ///< given scales: [T, num_scales]
  /// The caller's choice of each row: [sum of T, topk], int32 or int64; positions in the outputs of
  /// all ranks, one after another. Only with grouped rows, without padding and spare experts.
  std::optional<ConstTensorView> full_scatter_indices;
  /// With spare experts: none, or the experts in the spare slots, [W, spare_experts], -1: empty; as
  /// in EvenExpertsOptions.
  std::span<const std::int32_t> present = {};
};

/// Payloads that cross links. A token goes once to each rank; between nodes once to each node, to
/// the rank of the same local index, which forwards it.
struct ExpertTraffic {
  IndexArray rows_per_rank_pair;           ///< [W source, W]
  IndexArray unique_tokens_per_rank_pair;  ///< [W source, W]
  IndexArray inter_node_tokens;            ///< [W source, N]
  IndexArray inter_node_ranges;            ///< [W source, N]: contiguous pieces they go in
  /// [W, W]: tokens that rank r hands to rank s in a dispatch, forwarded ones among them. What
  /// stays on a rank does not count. A combine returns as many the other way, where the rows of a
  /// token are summed before they leave a rank (local_combine) or a node (several nodes).
  IndexArray crossings;
};

/// A dispatch of all ranks, and what belongs to it: one entry per rank.
struct ExpertDispatch {
  EPConfig config;  ///< slot_config of the config given
  EPDispatchOptions options;
  std::optional<ExpertSlots> slots;  ///< with spare experts; ids are then slots
  ExpertRows rows;
  std::vector<std::vector<std::int32_t>> ids;  ///< [T, topk]; a dropped topk slot is num_experts
  std::vector<std::vector<std::int32_t>> dst_row;  ///< [T, topk]: row on the expert's rank; -1
  std::vector<HostTensor> source_weights;  ///< [T, topk] of the sources; empty without weights
  std::vector<HostTensor> recv_tokens;     ///< [R, payload_columns]
  std::vector<HostTensor> recv_scales;     ///< [R, num_scales]; empty without scales
  std::vector<HostTensor> recv_weights;  ///< [R]; of compact rows [R, topk]; empty without weights
  std::vector<IndexArray> recv_origin;  ///< [R, 3] int32: source rank, token, (first) topk slot; -1
  std::vector<EPAll2AllLayoutDesc> layout;
  ExpertTraffic traffic;
};

/// Dispatches the tokens of all ranks: rows and their order as EPRows says, always the same.
/// Rows grouped by expert hold a token once for each topk slot; all forms carry its weight.
/// `config.rank` is not looked at. With spare experts the rows of all ranks are counted, copies
/// planned by even_experts, and slot_ids take the place of ids.
/// Source: the behaviour of EPAll2AllLayer.dispatch of Triton-distributed, with a fixed order.
/// @throws InvalidArgument naming the argument and the rank, before anything is moved
[[nodiscard]] ExpertDispatch simulate_expert_dispatch(const EPConfig& config,
                                                      const ExpertInputs& inputs,
                                                      const EPDispatchOptions& options = {});

/// How rows are summed.
struct EPCombineOptions {
  /// One node: rows of a token on one rank are summed there and rounded, then the ranks' sums.
  /// Several nodes do so per node anyway; it has no effect there.
  bool local_combine = false;
  /// Each row times the weight of its topk slot, as sums are, rounded, before it is added. Needs a
  /// dispatch with weights and grouped rows.
  bool weighted = false;
  friend bool operator==(const EPCombineOptions&, const EPCombineOptions&) = default;
};

/// Sums the experts' outputs of each token, where it came from.
///
/// Sums are float32, those of float64 rows float64, from +0, each addition rounded, never fused
/// with a product; then rounded to token_dtype (nearest even). Order: one node: topk slots
/// ascending. local_combine: topk slots ascending on each rank, rounded; then the ranks by the
/// first topk slot they have. Several nodes: topk slots ascending in each node, rounded; then nodes
/// ascending. Compact rows hold the sum of a rank already: ranks by the first topk slot they have,
/// in one node or in each node as above. Biases are added first. A token without a topk slot is the
/// sum of its biases, or 0.
/// Source: EPAll2AllLayer.combine of Triton-distributed; local_combine as it was meant.
/// @param expert_outputs [R, hidden] of token_dtype, one per rank, rows as in recv_tokens
/// @param biases up to two, each with one entry per rank: [T, hidden] of token_dtype
/// @return [T, hidden] of token_dtype, one per rank
/// @throws InvalidArgument
[[nodiscard]] std::vector<HostTensor> simulate_expert_combine(
    const ExpertDispatch& dispatch, std::span<const ConstTensorView> expert_outputs,
    const EPCombineOptions& options = {},
    std::span<const std::span<const ConstTensorView>> biases = {});

}  // namespace waybill
