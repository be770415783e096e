#include <gtest/gtest.h>

#include <numeric>

#include "waybill/cost_model/predict_step.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/varlen_relay.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

PlannerOptions batch_options(std::int32_t world_size) {
  PlannerOptions options{.world_size = world_size, .tokens_per_rank = 0};
  options.kv_layout = KvLayout::per_query;
  options.tails = true;
  return options;
}

using Held = std::vector<std::vector<DocumentRange>>;

/// A document of rank 0, and short ones of all.
Held skewed(std::int32_t world_size, std::int64_t longest) {
  Held held(static_cast<std::size_t>(world_size));
  std::int64_t document = 1;
  held[0].push_back({.document = 0, .offset = 0, .length = longest});
  for (auto& rank : held) {
    for (int i = 0; i < 20; ++i)
      rank.push_back({.document = document++, .offset = 0, .length = 500});
  }
  return held;
}

StepOptions step_of(const PlannerOptions& options, TransferMode transfer) {
  return {.model = options.model,
          .mask = options.mask,
          .hardware = options.hardware,
          .transfer = transfer};
}

TEST(BatchStep, ForwardsWhereTheStepIsShorter) {
  for (const std::int32_t world : {8, 64}) {
    const PlannerOptions options = batch_options(world);
    const QkvPlan plan = plan_pieces(skewed(world, 20000), options);
    const VarlenRouting routing = compute_varlen_routing(plan);
    const RelaySchedule relay = relay_that_pays(plan, routing, options);
    ASSERT_FALSE(relay.empty());
    const StepPredictor predictor(plan, routing, &relay);
    const double without = predictor
                               .predict(step_of(options, world > 8 ? TransferMode::once_per_node
                                                                   : TransferMode::direct))
                               .seconds;
    EXPECT_LT(predictor.predict(step_of(options, TransferMode::relay)).seconds, 0.99 * without);
  }
}

TEST(BatchStep, SendsStraightWhereNothingIsGained) {
  for (const std::int32_t world : {1, 2, 8}) {
    const PlannerOptions options = batch_options(world);
    Held held(static_cast<std::size_t>(world));
    for (std::int32_t r = 0; r < world; ++r)
      held[static_cast<std::size_t>(r)].push_back(
          {.document = r, .offset = 0, .length = 4000 + 100 * r});
    const QkvPlan plan = plan_pieces(held, options);
    const VarlenRouting routing = compute_varlen_routing(plan);
    EXPECT_TRUE(relay_that_pays(plan, routing, options).empty()) << world << " ranks";
  }
}

TEST(BatchStep, RowsThatStayAreAttendedToMeanwhile) {
  const PlannerOptions options = batch_options(8);
  const QkvPlan plan = plan_pieces(skewed(8, 20000), options);
  const VarlenRouting in_place = compute_varlen_routing(plan, true);
  const VarlenRouting dispatched = compute_varlen_routing(plan, false);
  const StepOptions step = step_of(options, TransferMode::direct);
  const StepPrediction beside = StepPredictor(plan, in_place).predict(step);
  const StepPrediction after = StepPredictor(plan, dispatched).predict(step);
  EXPECT_LT(beside.seconds, after.seconds);
  EXPECT_EQ(beside.work, after.work);
  const PhasePrediction& kernel = beside.phase(StepPhase::attention);
  for (std::size_t r = 0; r < kernel.end.size(); ++r) {
    EXPECT_LE(kernel.end[r], after.phase(StepPhase::attention).end[r]);
    EXPECT_GE(kernel.end[r] + 1e-12,
              after.phase(StepPhase::attention).seconds[r]);  // no work is left out
  }
  double path = 0;
  for (const StepCause& cause : beside.path) path += cause.seconds;
  EXPECT_NEAR(path, beside.seconds, 1e-12);
}

TEST(BatchStep, AllThatStaysTakesTheKernelsTime) {
  const PlannerOptions options = batch_options(2);
  const Held held = {{{.document = 0, .offset = 0, .length = 9000}},
                     {{.document = 1, .offset = 0, .length = 9000}}};
  const QkvPlan plan = plan_pieces(held, options);
  const StepOptions step = step_of(options, TransferMode::direct);
  const StepPrediction found = StepPredictor(plan, compute_varlen_routing(plan)).predict(step);
  const double kernel = found.phase(StepPhase::attention).end[0];
  const double alone = static_cast<double>(rank_work(plan)[0]) * 4 *
                       static_cast<double>(options.model.q_hidden) /
                       step.costs.forward_flops_per_second;
  EXPECT_NEAR(kernel, alone, 1e-9) << "the dispatch, which brings nothing, is hidden";
}

}  // namespace
}  // namespace waybill
