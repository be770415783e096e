#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/moe/ep_config.h"
#include "waybill/planner/expert_balance.h"

namespace waybill {

// The assignment of rows to ranks, in steps that each rank can do for itself. W ranks, P experts
// per rank, E = W P experts, K topk slots. All tables are int32 and row-major. A row is a place in
// a receiver's output.

/// Entries of one rank's counts: its topk slots of each expert [E], its dropped topk slots [1], and
/// its tokens with a topk slot on each rank [W]. Ranks exchange this much before rows can be
/// placed.
[[nodiscard]] inline std::int64_t num_counts(const EPConfig& config) {
  return std::int64_t{config.num_experts} + 1 + config.world_size;
}

/// Ids as int32, a dropped topk slot as num_experts.
/// @param ids [T, topk], int32 or int64, any strides
/// @throws InvalidArgument for another dtype or shape, T > max_tokens, or an id that is neither in
///   0..num_experts-1 nor the dropped one, naming token and topk slot; `who` begins the text.
[[nodiscard]] std::vector<std::int32_t> read_expert_ids(const EPConfig& config,
                                                        const EPDispatchOptions& options,
                                                        const ConstTensorView& ids,
                                                        const char* who);

/// The counts of one rank, from what read_expert_ids gave. @return [num_counts]
[[nodiscard]] std::vector<std::int32_t> count_topk_slots(const EPConfig& config,
                                                         std::span<const std::int32_t> ids);

/// The copies of one dispatch with spare experts: the same on all ranks.
struct ExpertSlots {
  std::vector<std::int64_t> rows;  ///< [W, E]: topk slots of each expert by source rank
  EvenExperts plan;  ///< a plan of these rows; slot_ids puts its slots in place of ids
};

/// How a layer plans copies, without those that are present: nodes are the layer's, and copies take
/// multiples of expert_alignment.
[[nodiscard]] EvenExpertsOptions copy_options(const EPConfig& config,
                                              const EPDispatchOptions& options);

/// Plans the copies of a dispatch with even_experts and copy_options.
/// @param counts [W] of at least [E], by rank, from count_topk_slots
/// @param present as in EvenExpertsOptions
[[nodiscard]] ExpertSlots plan_slots(const EPConfig& config, const EPDispatchOptions& options,
                                     std::span<const std::span<const std::int32_t>> counts,
                                     std::span<const std::int32_t> present);

/// The same from the ids of all ranks, which become slots of slot_config.
/// @param ids [W] of [T, topk], from read_expert_ids
[[nodiscard]] ExpertSlots take_slots(const EPConfig& config, const EPDispatchOptions& options,
                                     std::span<const std::int32_t> present,
                                     std::span<std::vector<std::int32_t>> ids);

/// Where every receiver keeps the rows of every expert and source: the same on all ranks.
struct ExpertRows {
  std::vector<std::int32_t> splits;       ///< [W, E + 1]: topk slots of each expert by source rank
  std::vector<std::int32_t> rank_tokens;  ///< [W source, W]: tokens with a topk slot on that rank
  std::vector<std::int32_t> num_input_tokens;  ///< [W]
  /// [W, P, W source]: first row of the segment of a local expert and source. With compact rows,
  /// its first place in the grouped order that the maps speak of.
  std::vector<std::int32_t> segment_offsets;
  std::vector<std::int32_t> expert_counts;    ///< [W, P]: rows without padding
  std::vector<std::int32_t> expert_offsets;   ///< [W, P + 1]: first rows, with padding
  std::vector<std::int32_t> compact_offsets;  ///< [W, W source + 1]: first compact rows
  std::vector<std::int32_t> num_recv_rows;    ///< [W]: rows of the output, as the options say
  std::int64_t largest_recv_rows = 0;

  friend bool operator==(const ExpertRows&, const ExpertRows&) = default;
};

/// @param counts [W] of [num_counts], by rank
/// @throws InternalError when the topk slots of a rank are no multiple of topk
[[nodiscard]] ExpertRows locate_rows(const EPConfig& config, const EPDispatchOptions& options,
                                     std::span<const std::span<const std::int32_t>> counts);

/// @param counts [W, num_counts], one rank's after the other's
[[nodiscard]] ExpertRows locate_rows(const EPConfig& config, const EPDispatchOptions& options,
                                     std::span<const std::int32_t> counts);

/// The row of each topk slot of rank `source` on the rank of its expert, -1 for a dropped one. With
/// compact rows all topk slots of a token on one rank have the same.
/// @param ids [T, topk] of that rank, from read_expert_ids
/// @return [T, topk]
[[nodiscard]] std::vector<std::int32_t> place_topk_slots(const EPConfig& config,
                                                         const EPDispatchOptions& options,
                                                         const ExpertRows& rows,
                                                         std::int32_t source,
                                                         std::span<const std::int32_t> ids);

/// The same for an order that the caller chose.
/// @param positions [T, topk]: the part of full_scatter_indices for rank `source`: positions in the
///   outputs of all ranks, one after another. Those of dropped topk slots are not looked at.
/// @throws InvalidArgument when a position is not on the rank of the topk slot's expert, or one is
///   used twice
[[nodiscard]] std::vector<std::int32_t> place_by_scatter_indices(
    const EPConfig& config, const ExpertRows& rows, std::int32_t source,
    std::span<const std::int32_t> ids, std::span<const std::int64_t> positions, const char* who);

/// The order that waybill gives rows anyway, as full_scatter_indices: each position after a stable
/// sort by expert of the topk slots of all ranks; dropped ones come last.
/// @param ids one entry per rank, [T, topk] each, from read_expert_ids
/// @return [sum of T, topk]
[[nodiscard]] std::vector<std::int32_t> canonical_scatter_indices(
    const EPConfig& config, std::span<const std::vector<std::int32_t>> ids);

/// The tokens that a rank sends to each other node, as runs; a token is sent once per node. Tokens
/// are cut into tiles of 256; run c of tile i is at slot 256 i + c, starts before ends.
/// @return [nodes, 2, max_tokens]; -1 where there is no run, and for the own node
[[nodiscard]] std::vector<std::int32_t> node_send_requests(const EPConfig& config,
                                                           std::int32_t source,
                                                           std::span<const std::int32_t> ids);

// Copies of experts: their weights come from the expert's home, their gradients go back there.
// R ranks with S slots each: P = num_experts / num_ranks home experts, then S - P spare slots.

/// Which expert lies in which slot, as EvenExperts::slots says.
struct ExpertSlotTable {
  std::int32_t num_ranks = 0;
  std::int32_t num_experts = 0;
  std::span<const std::int32_t> experts = {};  ///< [R, S]; -1: the slot is empty

  [[nodiscard]] std::int32_t experts_per_rank() const { return num_experts / num_ranks; }
  [[nodiscard]] std::int32_t slots_per_rank() const {
    return static_cast<std::int32_t>(std::ssize(experts) / num_ranks);
  }
  [[nodiscard]] std::int32_t num_spare() const { return slots_per_rank() - experts_per_rank(); }
  [[nodiscard]] std::int32_t home_of(std::int32_t expert) const {
    return expert / experts_per_rank();
  }

  /// @throws InvalidArgument for another shape, a home slot without its expert, or a spare slot
  ///   with an expert that its rank has already; `who` begins the text
  void check(const char* who) const;
};

/// One expert on its way from a slot to a slot of another rank.
struct ExpertTransfer {
  std::int32_t expert = 0;
  std::int32_t source = 0;       ///< rank
  std::int32_t source_slot = 0;  ///< 0..S-1
  std::int32_t target = 0;       ///< rank
  std::int32_t target_slot = 0;  ///< 0..S-1

  friend bool operator==(const ExpertTransfer&, const ExpertTransfer&) = default;
};

/// The weights of all copies, one transfer per copy. Each rank makes its own transfers in this
/// order, so that no two wait for each other.
///
/// An expert with several copies is forwarded: the first copy on each node gets it along a binomial
/// tree of the nodes, the others along one of the ranks of their node. A node is sent an expert
/// once, and its home sends it at most ceil(log2(nodes)) + ceil(log2(ranks_per_node)) times.
/// @param ranks_per_node ranks of a node, in order; a divisor of num_ranks
/// @throws InvalidArgument as ExpertSlotTable::check
[[nodiscard]] std::vector<ExpertTransfer> plan_weight_transfers(const ExpertSlotTable& slots,
                                                                std::int32_t ranks_per_node);

/// The gradients of all copies to their homes, one transfer per copy: by expert, then by rank.
/// @throws InvalidArgument as ExpertSlotTable::check
[[nodiscard]] std::vector<ExpertTransfer> plan_gradient_transfers(const ExpertSlotTable& slots);

/// The weights in all slots once copies have theirs: the specification of what CopyExchange brings.
/// @param home [R] of [P, row_bytes]: any bytes, row_bytes of each expert
/// @return [R] of [S, row_bytes]: home experts as given, copies as their homes; zeros where empty
/// @throws InvalidArgument as ExpertSlotTable::check, or for another number of bytes
[[nodiscard]] std::vector<std::vector<std::byte>> simulate_expert_copies(
    const ExpertSlotTable& slots, std::span<const std::span<const std::byte>> home,
    std::int64_t row_bytes);

/// The gradients of the home experts once those of copies are added: the specification. The sum of
/// an expert begins with home's gradient; copies follow by rank. Sums are float32, float64 for
/// float64, and rounded once to home's dtype, nearest even. An expert without copies stays as it
/// is.
/// @param home [R] of [P, n]: float32, float16, bfloat16 or float64, contiguous
/// @param copies [R] of [S - P, n]: float32, or float64 where home is float64, contiguous; not read
///   where the slot is empty
/// @return [R] of [P, n], of home's dtype
/// @throws InvalidArgument as ExpertSlotTable::check, or for other shapes and dtypes
[[nodiscard]] std::vector<HostTensor> simulate_expert_copy_gradients(
    const ExpertSlotTable& slots, std::span<const ConstTensorView> home,
    std::span<const ConstTensorView> copies);

}  // namespace waybill
