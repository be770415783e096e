#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/cost_model/predict_step.h"
#include "waybill/planner/planner_options.h"

namespace waybill {

/// A prediction and what it is of.
struct NamedStep {
  std::string name;
  std::int64_t num_shards = 0;
  StepPrediction step;
};

struct CompareOptions {
  PlannerOptions planner = {};  ///< also ranks, rows, mask and hardware of the others
  StepCosts costs = {};
  /// Ranks of a context-parallel group; 0: the largest divisor of the world within a node.
  std::int32_t degree = 0;
};

/// The same documents by static zigzag ("zigzag"), by static sharding of each document ("per
/// document") and by the planner, sent straight ("planner") and, if options.planner.relay, with its
/// relay schedule ("planner, relay").
///
/// The static plans have no window: with one, their transfers still move all keys before a query,
/// and their kernels count the window's alone. Their keys move as a dispatch moves them; rings that
/// overlap them with attention are not modelled.
/// @throws InvalidArgument as plan_attention, zigzag_plan and predict_step.
[[nodiscard]] std::vector<NamedStep> compare_plans(std::span<const std::int64_t> doc_lengths,
                                                   const CompareOptions& options);

/// One plan sent in each way that it can be: straight, once per node where there are several, and
/// by relay where it has a schedule. `options.transfer` is not looked at.
[[nodiscard]] std::vector<NamedStep> compare_transfers(const StepPredictor& predictor,
                                                       const StepOptions& options,
                                                       std::int64_t num_shards);

}  // namespace waybill
