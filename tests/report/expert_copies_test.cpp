#include "waybill/report/expert_copies.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/expect_error.h"

namespace waybill {
namespace {

/// Four ranks of two experts, of which expert 0 has 160 rows; two nodes where `per_node` is 2.
EPConfig config_of(std::int32_t per_node) {
  EPConfig config;
  config.max_tokens = 100;
  config.hidden = 128;
  config.topk = 1;
  config.num_experts = 8;
  config.world_size = 4;
  config.local_world_size = per_node;
  return config;
}

/// Each rank has 40 tokens for expert 0 and 4 for each other one.
std::vector<std::vector<std::int32_t>> hot_ids() {
  std::vector<std::int32_t> ids(40, 0);
  for (std::int32_t e = 1; e < 8; ++e) ids.insert(ids.end(), 4, e);
  return std::vector<std::vector<std::int32_t>>(4, ids);
}

ExpertCopyCosts costs_of() {
  ExpertCopyCosts costs;
  costs.intermediate = 64;
  costs.gemm_flops_per_second = 1e9;
  costs.calls.links.nvlink_bytes_per_second = 1e6;
  costs.calls.links.network_bytes_per_second = 1e5;
  return costs;
}

ExpertCallPrediction call_of(const EPConfig& config, const EPDispatchOptions& options,
                             ExpertCallKind kind) {
  return predict_experts(config, options, hot_ids(), costs_of().calls)[static_cast<int>(kind)];
}

TEST(ExpertCopies, PricesCopiesByHand) {
  const EPConfig config = config_of(4);
  const EPDispatchOptions options{.spare_experts = 1};
  const ExpertCopies copies = price_expert_copies(config, options, hot_ids(), costs_of());
  EXPECT_EQ(copies.rows_before, (std::vector<std::int64_t>{176, 32, 32, 32}));
  EXPECT_EQ(copies.rows_after, (std::vector<std::int64_t>{68, 68, 68, 68}));
  EXPECT_EQ(copies.weight_bytes, 3 * 128 * 64 * 2);
  EXPECT_EQ(copies.gradient_bytes, 3 * 128 * 64 * 4);
  EXPECT_EQ(copies.busiest, 0);
  EXPECT_TRUE(copies.busiest_sends);
  EXPECT_FALSE(copies.network);
  // Of three copies one is forwarded by another.
  EXPECT_EQ(copies.busiest_weights, 2);
  EXPECT_EQ(copies.weights_sent, (std::vector<std::int32_t>{2, 1, 0, 0}));
  const ExpertStepSeconds &before = copies.before, &after = copies.after;
  // 2 operations for each of 3 * 128 * 64 elements and row.
  EXPECT_NEAR(before.gemm, 176 * 2.0 * 3 * 128 * 64 / 1e9, 1e-12);
  EXPECT_NEAR(after.gemm, 68 * 2.0 * 3 * 128 * 64 / 1e9, 1e-12);
  EXPECT_NEAR(copies.weight_seconds, 2 * 49152 / 1e6, 1e-12);
  EXPECT_NEAR(after.gradients, 3 * 98304 / 1e6, 1e-12);
  EXPECT_NEAR(after.weights, 2 * 49152 / 1e6, 1e-12);
  EXPECT_NEAR(copies.forward_gain(),
              before.dispatch + before.gemm + before.combine - after.dispatch - after.weights -
                  after.gemm - after.combine,
              1e-12);
  EXPECT_NEAR(copies.backward_gain(),
              before.cached_dispatch + 2 * before.gemm + before.combine - after.cached_dispatch -
                  after.weights - 2 * after.gemm - after.combine - after.gradients,
              1e-12);
}

TEST(ExpertCopies, RowsArePricedWhereTheyGo) {
  for (const std::int32_t per_node : {4, 2}) {
    const EPConfig config = config_of(per_node);
    const ExpertCopies copies =
        price_expert_copies(config, {.spare_experts = 1}, hot_ids(), costs_of());
    const auto combine =
        per_node == 4 ? ExpertCallKind::summed_combine : ExpertCallKind::grouped_combine;
    for (const auto& [step, spare] : {std::pair{copies.before, 0}, std::pair{copies.after, 1}}) {
      const EPDispatchOptions options{.spare_experts = spare};
      const auto seconds = [&](ExpertCallKind kind) {
        return call_of(config, options, kind).seconds;
      };
      EXPECT_EQ(step.dispatch, seconds(ExpertCallKind::grouped_dispatch));
      EXPECT_EQ(step.cached_dispatch, seconds(ExpertCallKind::cached_dispatch));
      EXPECT_EQ(step.combine, seconds(combine));
    }
    // 120 rows of other ranks go to rank 0 without copies: its link is the bound of the call.
    EXPECT_LT(copies.after.combine, copies.before.combine);
    EXPECT_EQ(copies.before.weights + copies.before.gradients, 0);
  }
}

TEST(ExpertCopies, CopiesOnAnotherNodeGoOverTheNetwork) {
  const ExpertCopies copies =
      price_expert_copies(config_of(2), {.spare_experts = 1}, hot_ids(), costs_of());
  EXPECT_TRUE(copies.network);  // at a tenth of the speed, once: then inside the node
  EXPECT_EQ(copies.busiest_weights, 1);
  EXPECT_NEAR(copies.weight_seconds, 49152 / 1e5, 1e-12);
  EXPECT_NEAR(copies.after.gradients, 2 * 98304 / 1e5, 1e-12);
  // The last copy has come over both.
  EXPECT_NEAR(copies.after.weights, 49152 / 1e5 + 49152 / 1e6, 1e-12);
  EXPECT_TRUE(explain_expert_copies(copies, costs_of())[5].starts_with(
      "Weights follow the rows of the dispatch, so nothing hides them: 541 ms in forward until the "
      "last forwarded copy has come"));
}

TEST(ExpertCopies, ProductsHaveWholeTiles) {
  const ExpertCopies copies = price_expert_copies(
      config_of(4), {.expert_alignment = 16, .spare_experts = 1}, hot_ids(), costs_of());
  EXPECT_EQ(copies.tiled_before, 160 + 16);
  std::int64_t most = 0;
  for (std::int32_t r = 0; r < 4; ++r) {
    std::int64_t tiles = 0;
    for (std::int32_t s = 0; s < 3; ++s) tiles += (copies.plan.quotas[r * 3 + s] + 15) / 16 * 16;
    most = std::max(most, tiles);
  }
  EXPECT_EQ(copies.tiled_after, most);
}

TEST(ExpertCopies, RowsDoNotHideWeights) {
  ExpertCopyCosts costs = costs_of();
  costs.calls.links.block_bytes_per_second = 1e3;  // stores take longer than links
  const ExpertCopies copies =
      price_expert_copies(config_of(4), {.spare_experts = 1}, hot_ids(), costs);
  EXPECT_NEAR(copies.after.weights, 2 * 49152 / 1e6, 1e-12);
}

TEST(ExpertCopies, SaysInWhichPartOfAStepCopiesPay) {
  ExpertCopies copies =
      price_expert_copies(config_of(4), {.spare_experts = 1}, hot_ids(), costs_of());
  const auto says = [&](double weights, double gradients, const std::string& verdict) {
    copies.after.weights = weights;
    copies.after.gradients = gradients;
    return explain_expert_copies(copies, costs_of())[6].starts_with(verdict + ": forward gains");
  };
  const double gain = copies.before.gemm - copies.after.gemm;
  EXPECT_TRUE(says(0, 0, "Copies pay"));
  EXPECT_TRUE(says(0, 100 * gain, "Copies pay in forward alone"));
  copies.before.dispatch = copies.after.dispatch;
  copies.before.combine = copies.after.combine;
  copies.before.cached_dispatch = copies.after.cached_dispatch;
  EXPECT_TRUE(says(1.1 * gain, 0, "Copies pay over forward and backward"));
  EXPECT_TRUE(says(2 * gain, 0, "Copies do not pay"));
}

TEST(ExpertCopies, WithoutCopiesPlanningIsPaid) {
  std::vector<std::vector<std::int32_t>> even(4);
  for (std::int32_t e = 0; e < 32; ++e)
    for (auto& ids : even) ids.push_back(e % 8);
  const ExpertCopies copies =
      price_expert_copies(config_of(4), {.spare_experts = 1}, even, costs_of());
  EXPECT_EQ(copies.weight_seconds, 0);
  EXPECT_EQ(copies.after.weights, 0);
  EXPECT_LE(copies.forward_gain(), -costs_of().calls.costs.planning_seconds(config_of(4)));
  EXPECT_NEAR(copies.backward_gain(), 0, 1e-12);
  EXPECT_EQ(explain_expert_copies(copies, costs_of()).size(), 2);
}

TEST(ExpertCopies, BreakEvenRowsOutweighWhatTheyCost) {
  const EPConfig config = config_of(4);
  ExpertCopyCosts costs = costs_of();
  // An element is 2 bytes twice and 4 bytes once, at 1e6 bytes per second; a row costs it 2
  // operations three times, at 1e9 per second.
  EXPECT_EQ(break_even_rows(config, costs), std::ceil(8 / 1e6 / (6 / 1e9)));
  EXPECT_EQ(break_even_rows(config, costs, {.network = true}), std::ceil(8 / 1e5 / (6 / 1e9)));
  EXPECT_EQ(break_even_rows(config, costs, {.weights = 1, .gradients = 0, .gemm = 1}), 1000);
  EXPECT_EQ(break_even_rows(config, costs, {.weights = 0, .gradients = 0}), 0);
  costs.intermediate = 4096;
  EXPECT_EQ(break_even_rows(config, costs, {.weights = 1, .gradients = 0, .gemm = 1}), 1000);
  // A copy of so many rows takes as long over its link as the products that it takes away.
  const double rows = 1000.0 * 2 * 3 * 128 * 4096 / 1e9;
  EXPECT_NEAR(rows, 3 * 128 * 4096 * 2 / 1e6, 1e-9);
  for (const double wrong : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_TRUE(test::rejects([&] { (void)break_even_rows(config, costs, {.weights = wrong}); },
                              {"break_even_rows: trips.weights = "}));
  }
  EXPECT_TRUE(test::rejects([&] { (void)break_even_rows(config, costs, {.gemm = 0}); },
                            {"trips.gemm = 0, expected a number > 0"}));
}

TEST(ExpertCopies, RefusesWhatMakesNoSense) {
  const auto priced = [&](const ExpertCopyCosts& costs, const EPDispatchOptions& options) {
    return [=] { (void)price_expert_copies(config_of(4), options, hot_ids(), costs); };
  };
  ExpertCopyCosts costs = costs_of();
  costs.intermediate = 0;
  EXPECT_TRUE(test::rejects(priced(costs, {}), {"costs.intermediate = 0, expected 1 to 2^24"}));
  costs = costs_of();
  for (const double wrong : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    costs.gemm_flops_per_second = wrong;
    EXPECT_TRUE(test::rejects(priced(costs, {}), {"costs.gemm_flops_per_second"}));
  }
  costs = costs_of();
  costs.calls.links.nvlink_bytes_per_second = 0;
  EXPECT_TRUE(test::rejects(priced(costs, {}), {"nvlink_bytes_per_second"}));
  EXPECT_TRUE(test::rejects(priced(costs_of(), {.spare_experts = 9}), {"spare_experts = 9"}));
}

}  // namespace
}  // namespace waybill
