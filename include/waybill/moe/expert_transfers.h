#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "waybill/core/host_tensor.h"

namespace waybill {

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
