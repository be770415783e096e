#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace waybill {

/// How experts are evened out. R ranks hold E / R home experts each, in order of expert.
struct EvenExpertsOptions {
  /// Slots per rank besides its home experts, >= 0; each holds a copy of another rank's expert.
  std::int32_t spare_experts = 0;
  /// Experts that lie in the spare slots already, [R * spare_experts], -1 for an empty slot; empty:
  /// none lies anywhere. The same on all ranks.
  std::span<const std::int32_t> present = {};
  /// A copy takes at least so many rows, >= 0. This comes before evenness.
  std::int64_t min_rows = 0;
  /// The fullest rank may have so many times the lower bound, >= 1. A higher limit needs fewer
  /// copies.
  double limit = 1.0;
  /// A new copy takes a multiple of so many rows, or all that the expert's home has left; >= 1.
  std::int64_t alignment = 1;
  /// Nodes of num_ranks / num_nodes ranks each, in order, >= 1. A copy lies on a node that has the
  /// expert where a rank there has room for seven eighths of what the emptiest rank would take.
  std::int32_t num_nodes = 1;
};

/// Which expert lies in which slot and how many rows each slot takes. Tables are [R,
/// slots_per_rank], home experts first, in order of expert, then the spare slots.
struct EvenExperts {
  std::int32_t num_ranks = 0;
  std::int32_t slots_per_rank = 0;
  std::vector<std::int32_t> slots;   ///< the expert of each slot; -1: the slot is empty
  std::vector<std::int64_t> quotas;  ///< rows that a slot takes; an expert's quotas sum to its rows
  /// A slot takes so many rows of its own rank, the first in token order, ...
  std::vector<std::int64_t> local_rows;
  /// ... and of what its expert's slots leave of all ranks, ordered by source rank, then token, the
  /// rows [first_row, first_row + quota - local_rows).
  std::vector<std::int64_t> first_row;
  std::int64_t max_rows = 0;  ///< rows of the fullest rank
  double mean_rows = 0;       ///< rows per rank in the mean
  /// No choice of copies has a fullest rank with fewer rows; at least the mean, rounded up.
  std::int64_t bound = 0;
  std::vector<std::int32_t> weights_out;  ///< [R] experts whose weights a rank sends, once per copy
  std::vector<std::int32_t> weights_in;   ///< [R] experts whose weights a rank receives
};

/// Plans copies of hot experts for one microbatch. Its memory is allocated once per shape.
class EvenExpertsPlanner {
 public:
  /// Throws InvalidArgument where a value is out of range, or the experts do not divide by ranks.
  EvenExpertsPlanner(std::int32_t num_ranks, std::int32_t num_experts,
                     const EvenExpertsOptions& options);
  EvenExpertsPlanner(EvenExpertsPlanner&&) noexcept;
  EvenExpertsPlanner& operator=(EvenExpertsPlanner&&) noexcept;
  ~EvenExpertsPlanner();

  /// Writes the plan of `rows`, [R, E]: rows of each source rank for each expert, >= 0.
  ///
  /// The rule is the specification; python/waybill/moe/even_experts_rule.py has it in 200 lines.
  /// `plan.slots` may be the last call's: its memory is used again.
  /// Throws InvalidArgument for a negative number, or where all rows are more than 2^53.
  void plan(std::span<const std::int64_t> rows, EvenExperts& plan);

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// The plan of one microbatch; see EvenExpertsPlanner.
[[nodiscard]] EvenExperts even_experts(std::span<const std::int64_t> rows, std::int32_t num_ranks,
                                       std::int32_t num_experts, const EvenExpertsOptions& options);

/// The slots that a rank's tokens go to: its expert ids with the copies of a plan in place of the
/// experts. A layer of num_ranks * slots_per_rank experts takes them as ids: slot s of rank r is
/// expert r * slots_per_rank + s there, and empty slots get no rows. Local first, as EvenExperts
/// says.
/// @param rows [R, E] that the plan was made from
/// @param ids [T, K] of this rank in token order; num_experts or -1: a dropped topk slot
/// @return [T, K]; a dropped topk slot is the number of slots, or stays -1
/// @throws InvalidArgument where the plan is not one of `rows`, or `ids` have other numbers of an
///   expert than `rows` say
[[nodiscard]] std::vector<std::int32_t> slot_ids(const EvenExperts& plan,
                                                 std::span<const std::int64_t> rows,
                                                 std::span<const std::int32_t> ids,
                                                 std::int32_t rank);

/// Where experts lie for many microbatches, from counted loads. An expert may have copies, each on
/// another rank; its rows are split evenly among them.
struct ExpertPlacementOptions {
  std::int32_t num_ranks = 1;
  std::int32_t slots_per_rank = 0;  ///< 0: num_experts / num_ranks, without copies
  std::int32_t num_nodes = 1;       ///< each has num_ranks / num_nodes ranks, in order
  /// Experts of a group (num_experts / num_groups, in order) lie on one node, and a node holds as
  /// many groups as any other; 0: experts lie anywhere.
  std::int32_t num_groups = 0;
  /// The experts that lie in the slots now, [layers, num_ranks, slots_per_rank], -1 for an empty
  /// slot; empty: nothing.
  std::span<const std::int32_t> present = {};
  /// Experts that may come to a rank per layer; -1: any number. Needs `present`.
  std::int64_t max_moves = -1;
};

struct ExpertPlacement {
  std::vector<std::int32_t> slots;   ///< [layers, num_ranks, slots_per_rank], -1: the slot is empty
  std::vector<std::int32_t> copies;  ///< [layers, num_experts], >= 1
  std::vector<double> rank_loads;    ///< [layers, num_ranks]
  std::vector<std::int32_t> moves;   ///< [layers] experts that come to a rank
};

/// Places experts so that the fullest rank has little load, for each layer alone. `loads` is
/// [layers, num_experts], >= 0. No rank holds an expert twice.
///
/// The problem is that of EPLB (github.com/deepseek-ai/EPLB): copies for the largest load per copy,
/// largest first to the emptiest rank, by groups to nodes. Exchanges follow until none lowers the
/// fullest rank's load.
/// Throws InvalidArgument for an option out of range or a load that is negative or not finite.
[[nodiscard]] ExpertPlacement plan_expert_placement(std::span<const double> loads,
                                                    std::int64_t num_layers,
                                                    std::int32_t num_experts,
                                                    const ExpertPlacementOptions& options);

}  // namespace waybill
