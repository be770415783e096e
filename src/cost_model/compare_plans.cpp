#include <algorithm>
#include <optional>
#include <utility>

#include "waybill/cost_model/predict_step.h"
#include "waybill/cost_model/predict_ulysses.h"
#include "waybill/planner/static_plans.h"

namespace waybill {
namespace {

/// Ulysses in groups of `degree` ranks, or 0: of those that make its step shortest.
std::optional<NamedStep> best_ulysses(std::span<const std::int64_t> doc_lengths,
                                      StaticPlanOptions groups, const CompareOptions& options,
                                      const StepOptions& step) {
  const auto heads = heads_of(step.model, options.head_dim);
  std::optional<NamedStep> best;
  for (std::int32_t d = 2; heads && d <= groups.world_size; ++d) {
    if (groups.world_size % d != 0 || (options.degree > 0 && d != options.degree)) continue;
    if (!ulysses_heads(*heads, d)) continue;
    groups.degree = d;
    StepPrediction found = predict_ulysses(doc_lengths, groups, options.head_dim, step);
    if (best && found.seconds >= best->step.seconds) continue;
    best = {.name = "Ulysses",
            .num_shards = std::ssize(doc_lengths) * d,
            .step = std::move(found),
            .degree = d};
  }
  return best;
}

}  // namespace

std::vector<NamedStep> compare_plans(std::span<const std::int64_t> doc_lengths,
                                     const CompareOptions& options) {
  const AttentionPlan planned = plan_attention(doc_lengths, options.planner);
  StepOptions step = StepOptions::of(planned);
  step.costs = options.costs;
  step.transfer = TransferMode::direct;
  const StaticPlanOptions fixed{
      .world_size = planned.options.world_size,
      .tokens_per_rank = planned.options.tokens_per_rank,
      .degree = options.degree > 0
                    ? options.degree
                    : StaticPlanOptions::degree_of(planned.options.world_size,
                                                   planned.options.hardware.ranks_per_node),
      .mask = planned.plan.mask};
  std::vector<NamedStep> steps;
  const auto add = [&](const char* name, const QkvPlan& plan) {
    steps.push_back({name, plan.num_shards(), predict_step(plan, step), fixed.degree});
  };
  add("zigzag", zigzag_plan(doc_lengths, fixed));
  add("per document", per_document_plan(doc_lengths, fixed));
  if (auto ulysses = best_ulysses(doc_lengths, fixed, options, step))
    steps.push_back(std::move(*ulysses));
  const StepPredictor predictor(planned);
  const std::int64_t num_shards = planned.plan.num_shards();
  steps.push_back({"planner", num_shards, predictor.predict(step)});
  if (predictor.has_relay()) {
    step.transfer = TransferMode::relay;
    steps.push_back({"planner, relay", num_shards, predictor.predict(step)});
  }
  return steps;
}

std::vector<NamedStep> compare_transfers(const StepPredictor& predictor, const StepOptions& options,
                                         std::int64_t num_shards) {
  StepOptions step = options;
  std::vector<NamedStep> steps;
  const auto add = [&](const char* name, TransferMode transfer) {
    step.transfer = transfer;
    steps.push_back({name, num_shards, predictor.predict(step)});
  };
  add("direct", TransferMode::direct);
  if (steps.front().step.world_size > options.hardware.ranks_per_node)
    add("once per node", TransferMode::once_per_node);
  if (predictor.has_relay()) add("relay", TransferMode::relay);
  return steps;
}

}  // namespace waybill
