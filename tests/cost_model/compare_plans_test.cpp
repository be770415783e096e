#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "waybill/core/error.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/cost_model/predict_ulysses.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/static_plans.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

double imbalance(const std::vector<std::int64_t>& work) {
  return static_cast<double>(*std::max_element(work.begin(), work.end())) *
         static_cast<double>(work.size()) / std::accumulate(work.begin(), work.end(), 0.0);
}

TEST(ComparePlans, AreThePlansByTheirNames) {
  const auto lengths = sample_documents(length_distribution("wlbllm"), 16 * 8192, 2);
  const CompareOptions options{.planner = {.world_size = 16, .tokens_per_rank = 8192}};
  const auto steps = compare_plans(lengths, options);
  ASSERT_EQ(steps.size(), 4U);
  EXPECT_EQ(steps[0].name, "zigzag");
  EXPECT_EQ(steps[1].name, "per document");
  EXPECT_EQ(steps[2].name, "Ulysses");
  EXPECT_EQ(steps[3].name, "planner");
  const StaticPlanOptions fixed{.world_size = 16, .tokens_per_rank = 8192, .degree = 8};
  StepOptions step;
  EXPECT_EQ(steps[0].step, predict_step(zigzag_plan(lengths, fixed), step));
  EXPECT_EQ(steps[1].step, predict_step(per_document_plan(lengths, fixed), step));
  EXPECT_EQ(steps[0].degree, 8);
  EXPECT_EQ(steps[3].degree, 0);
  const auto total = [](const NamedStep& s) {
    return std::accumulate(s.step.work.begin(), s.step.work.end(), std::int64_t{0});
  };
  for (const NamedStep& s : steps) EXPECT_EQ(total(s), total(steps[0])) << s.name;
}

// As BatchPlanner plans: per_query, tails, in place, over nodes K and V once per node.
TEST(ComparePlans, ThePlannerIsWhatTheModuleRuns) {
  const std::vector<std::int64_t> lengths = {16 * 2048, 16 * 1024, 8 * 1024, 8 * 1024};
  CompareOptions options{.planner = {.world_size = 16, .tokens_per_rank = 4096, .relay = false}};
  PlannerOptions batch = options.planner;
  batch.kv_layout = KvLayout::per_query;
  batch.tails = true;
  const QkvPlan plan = plan_attention(lengths, batch).plan;
  const auto planner = [&] { return compare_plans(lengths, options).back().step; };
  const auto routing = [&](bool in_place) { return compute_varlen_routing(plan, in_place); };
  const bool in_place = in_place_share(routing(true)) >= 0.5;
  StepOptions step;
  step.transfer = TransferMode::once_per_node;
  EXPECT_EQ(planner(), StepPredictor(plan, routing(in_place)).predict(step));
  options.planner.hardware.ranks_per_node = step.hardware.ranks_per_node = 16;
  step.transfer = TransferMode::direct;
  EXPECT_EQ(planner(), StepPredictor(plan, routing(in_place)).predict(step));
  options.planner.relay = true;
  EXPECT_LE(planner().seconds, StepPredictor(plan, routing(in_place)).predict(step).seconds);
  // Few rows: one call of the kernel, and nothing overlaps.
  const std::vector<std::int64_t> few = {2000, 1000};
  options.planner = {.world_size = 2, .tokens_per_rank = 1500, .relay = false};
  batch.world_size = 2;
  batch.tokens_per_rank = 1500;
  const QkvPlan small = plan_attention(few, batch).plan;
  EXPECT_EQ(compare_plans(few, options).back().step,
            StepPredictor(small, compute_varlen_routing(small, false)).predict({}));
}

// The planner is even where the static plans are not, and that shows in the kernels' time.
TEST(ComparePlans, QualityOnFixedBatches) {
  for (const char* distribution : {"wlbllm", "prolong"}) {
    double planned = 0;
    double by_document = 0;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const auto lengths = sample_documents(length_distribution(distribution), 64 * 65536, seed);
      const auto steps = compare_plans(lengths, {.planner = {.world_size = 64}});
      EXPECT_GT(imbalance(steps[0].step.work), 3) << distribution << " " << seed;
      EXPECT_GT(imbalance(steps[1].step.work), 1.5);
      EXPECT_LE(imbalance(steps[3].step.work), 1.01);
      EXPECT_LT(steps[3].step.seconds, 0.5 * steps[0].step.seconds);
      EXPECT_LT(steps[3].step.seconds, 1.2 * steps[1].step.seconds) << "its rows cross nodes";
      planned += steps[3].step.seconds;
      by_document += steps[1].step.seconds;
    }
    EXPECT_LT(planned, 0.75 * by_document) << distribution;
  }
}

TEST(ComparePlans, TheDegreeIsTheCallers) {
  const std::vector<std::int64_t> lengths = {4096, 4096};
  CompareOptions options{.planner = {.world_size = 4, .tokens_per_rank = 2048, .relay = false},
                         .degree = 2};
  const auto steps = compare_plans(lengths, options);
  ASSERT_EQ(steps.size(), 4U);
  EXPECT_EQ(steps[2].degree, 2);
  EXPECT_NEAR(imbalance(steps[0].step.work), 1, 1e-3) << "a document a group of two";
  options.degree = 3;
  EXPECT_THROW((void)compare_plans(lengths, options), InvalidArgument);
}

// 16 ranks of two nodes, 32 heads and 8 of K and V: groups of 2, 4, 8 and 16 divide them.
TEST(ComparePlans, UlyssesHasTheGroupsThatMakeItsStepShortest) {
  const std::vector<std::int64_t> even(16, 8192);
  CompareOptions options{.planner = {.world_size = 16, .tokens_per_rank = 8192, .relay = false}};
  const auto ulysses = [&](const std::vector<std::int64_t>& lengths) {
    return compare_plans(lengths, options)[2];
  };
  EXPECT_EQ(ulysses(even).degree, 2) << "a document a rank: the fewest bytes";
  EXPECT_EQ(ulysses(even).num_shards, 32);
  EXPECT_EQ(ulysses({16 * 8192}).degree, 16) << "one document";
  options.degree = 4;
  const StaticPlanOptions groups{.world_size = 16, .tokens_per_rank = 8192, .degree = 4};
  EXPECT_EQ(ulysses(even).step, predict_ulysses(even, groups, 128));
  options.degree = 0;
  options.planner.model.q_hidden = 4097;
  EXPECT_EQ(ulysses(even).name, "planner") << "no whole heads";
  options.planner.model.q_hidden = 5 * 128;
  EXPECT_EQ(ulysses(even).name, "planner") << "5 heads";
}

TEST(CompareTransfers, OnlyThoseThatApply) {
  const std::vector<std::int64_t> lengths = {9000, 100};
  const QkvPlan plan =
      zigzag_plan(lengths, {.world_size = 4, .tokens_per_rank = 4000, .degree = 4});
  const StepPredictor predictor(plan);
  StepOptions options;
  EXPECT_EQ(compare_transfers(predictor, options, 1).size(), 1U);
  options.hardware.ranks_per_node = 2;
  const auto steps = compare_transfers(predictor, options, 7);
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[1].name, "once per node");
  EXPECT_EQ(steps[1].num_shards, 7);
  EXPECT_LT(steps[1].step.seconds, steps[0].step.seconds);
}

}  // namespace
}  // namespace waybill
