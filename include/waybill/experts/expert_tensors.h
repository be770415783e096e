#pragma once

#include <cstdint>
#include <span>

#include "waybill/core/host_tensor.h"
#include "waybill/moe/simulate.h"

namespace waybill {

/// Partial sums of a weight's gradient, see ExpertGradientInput.
inline constexpr std::int64_t gradient_partial_sums = 256;

/// Whether a tensor was given at all; one without a shape was not. One of no tokens may be null.
[[nodiscard]] inline bool is_given(const ConstTensorView& view) { return !view.shape.empty(); }

class EPLayout;

/// The tensors that a rank dispatches: contiguous views of the world's memory. All ranks give
/// weights, or none. Ranks compare whether weights and full_scatter_indices are given, and the last
/// five fields.
struct ExpertDispatchInput {
  ConstTensorView tokens{};   ///< [T, input_columns]
  ConstTensorView ids{};      ///< [T, K], int32 or int64, unchecked where the host cannot read them
  ConstTensorView weights{};  ///< [T, K], or not given
  ConstTensorView scales{};   ///< [T, num_scales], or not given
  ConstTensorView full_scatter_indices{};  ///< [sum of T, K], int32 or int64, or not given
  /// The caller will run the call's backward, a combine, if it runs that of the others of the step.
  bool needs_gradients = false;
  bool weights_need_gradients = false;  ///< the same for the calls that return their gradients
  bool of_backward = false;             ///< the call is part of a backward pass
  /// EPLayout::number() of the dispatch that this one belongs to, perhaps in another layer; 0:
  /// none. Not looked at when the routing is known.
  std::uint32_t origin = 0;
  /// With spare experts: the layout of an earlier dispatch of this layer, whose copies are there
  /// already: EvenExpertsOptions::present. Null: none is. Not looked at when the routing is known.
  const EPLayout* present = nullptr;
};

struct ExpertCombineInput {
  ConstTensorView rows{};  ///< [R, hidden]; may be its place in the combine window already
  EPCombineOptions options{};
  std::span<const ConstTensorView> biases{};  ///< up to two, [T, hidden]
  TensorView output{};                        ///< [T, hidden]
  bool needs_gradients = false;  ///< the caller will run its backward, a dispatch; ranks compare it
  bool of_backward = false;      ///< the call is part of a backward pass; ranks compare it
  /// The layout may be of another layer of this world, which differs in hidden, dtypes and payload
  /// alone: rows go to the same tokens. Windows grow here, too.
  bool of_companion = false;
};

/// Backward of a weighted combine on the rank of the experts, when a dispatch by the layout has
/// brought the gradient of each row's sum there: nothing travels. Contiguous views of the world's
/// memory, of R rows; those after the rows that have arrived are neither read nor written.
///
/// Each weight's gradient is the dot product of row and gradient in float32 (of float64 rows in
/// float64), nothing fused: for each j below 256 the products of elements j, j + 256, ... are
/// added up from +0 on one by one, then partial sums that are 1, 2, 4, ... 128 apart.
struct ExpertGradientInput {
  ConstTensorView gradients{};    ///< [R, hidden]
  ConstTensorView weights{};      ///< [R], as the dispatch gave; given with row_gradients
  ConstTensorView rows{};         ///< [R, hidden] that were combined; given with weight_gradients
  TensorView row_gradients{};     ///< [R, hidden]: gradients times weights; may be not given
  TensorView weight_gradients{};  ///< [R] float32, float64 if weights are that; may be not given
};

/// The tables of one dispatch on a rank, as views of the memory of its world (on a GPU: of the
/// device). All int32 unless said. T tokens of this rank, M = max_tokens, N nodes, K topk slots, W
/// ranks, P experts per rank. Sizes that depend on counts are those of `capacity_rows`.
struct ExpertTableViews {
  ConstTensorView ids{};  ///< one node [T, K], else [N, M, K]; a dropped topk slot: num_experts
  ConstTensorView dst_rows{};            ///< [N, M, K]: row on the expert's rank; -1
  ConstTensorView weights{};             ///< as ids, weight_dtype; not given without weights
  ConstTensorView num_input_tokens{};    ///< [W]
  ConstTensorView splits{};              ///< [W, E + 1]
  ConstTensorView segment_offsets{};     ///< [W, P, W], see ExpertRows
  ConstTensorView expert_counts{};       ///< [P], of this rank
  ConstTensorView expert_offsets{};      ///< [P + 1], of this rank
  ConstTensorView num_recv_rows{};       ///< [W]
  ConstTensorView required_rows{};       ///< [1]: the most of them, also where fewer fit
  ConstTensorView primary_rows{};        ///< [capacity_rows]: see skipped_token_mapping_indices
  ConstTensorView topk_slot_rows{};      ///< [capacity_rows, K]: skipped_token_topk_mapping_indices
  ConstTensorView send_reqs{};           ///< several nodes: [N, 2, M], see send_reqs_recv_tensor
  ConstTensorView compact_to_grouped{};  ///< compact rows: [capacity_rows, K]
  ConstTensorView grouped_to_compact{};  ///< compact rows: [most grouped rows]
  ConstTensorView recv_topk{};           ///< compact rows: [capacity_rows, K]
  ConstTensorView recv_tags{};           ///< [capacity_rows, 4]: RowTag, kept beyond the window
  // With spare experts alone. Experts above are then slots, as slot_config says: P slots per rank.
  ConstTensorView slot_experts{};  ///< [W, P]: the expert of each slot, -1: it is empty
  ConstTensorView slot_quotas{};   ///< [W, P]: rows that each slot takes, without padding
};

/// Rows that windows of fixed size had no room for, the same on all ranks.
struct ExpertOverflow {
  std::int64_t rows = 0;   ///< the most that a rank should have received; 0: all did fit
  std::uint64_t call = 0;  ///< number of the dispatch
};

}  // namespace waybill
