#include <optional>
#include <utility>

#include "routing/homes.h"
#include "waybill/core/error.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/cost_model/predict_ulysses.h"
#include "waybill/planner/static_plans.h"
#include "waybill/routing/qkv_routing.h"

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

/// ContextParallelAttention attends to rows that stay where they are from here on (InPlaceRule).
constexpr std::int64_t min_rows_in_place = 2048;  // the mean of all ranks
constexpr double min_share_in_place = 0.5;        // a share of the pairs

/// The options with which ContextParallelAttention plans a batch.
PlannerOptions batch_options(PlannerOptions options) {
  options.kv_layout = KvLayout::per_query;
  options.tails = true;
  options.relay = false;  // the routing decides it, not the plan
  return options;
}

VarlenRouting batch_routing(const QkvPlan& plan) {
  std::int64_t rows = 0;
  for (const std::int64_t len : plan.shard_len) rows += len;
  if (rows >= min_rows_in_place * plan.world_size) {
    VarlenRouting routing = compute_varlen_routing(plan, true);
    if (in_place_share(routing) >= min_share_in_place) return routing;
  }
  return compute_varlen_routing(plan, false);
}

NamedStep batch_step(const AttentionPlan& planned, bool relay, StepOptions step) {
  const VarlenRouting routing = batch_routing(planned.plan);
  const RelaySchedule hops =
      relay ? relay_that_pays(planned.plan, routing, planned.options) : RelaySchedule{};
  const bool several_nodes = planned.plan.world_size > step.hardware.ranks_per_node;
  step.transfer = !hops.empty()   ? TransferMode::relay
                  : several_nodes ? TransferMode::once_per_node
                                  : TransferMode::direct;
  return {"planner", planned.plan.num_shards(),
          StepPredictor(planned.plan, routing, &hops).predict(step)};
}

}  // namespace

std::vector<NamedStep> compare_plans(std::span<const std::int64_t> doc_lengths,
                                     const CompareOptions& options) {
  const AttentionPlan planned = plan_attention(doc_lengths, batch_options(options.planner));
  if (const auto d = detail::document_of_too_many_copies(planned.plan)) {
    const auto& offsets = planned.plan.doc_shard_offsets;
    throw InvalidArgument(concat("compare_plans: the plan may need more than ",
                                 detail::max_kv_copies, " copies of KV shards (document ", *d,
                                 " has ", offsets[*d + 1] - offsets[*d],
                                 " shards); fewer ranks or more tokens per rank need fewer"));
  }
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
      .mask = planned.options.mask,
      .prefixes = planned.options.prefixes};
  std::vector<NamedStep> steps;
  const auto add = [&](const char* name, const QkvPlan& plan) {
    steps.push_back({name, plan.num_shards(), predict_step(plan, step), fixed.degree});
  };
  add("zigzag", zigzag_plan(doc_lengths, fixed));
  add("per document", per_document_plan(doc_lengths, fixed));
  if (auto ulysses = best_ulysses(doc_lengths, fixed, options, step))
    steps.push_back(std::move(*ulysses));
  steps.push_back(batch_step(planned, options.planner.relay, step));
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
