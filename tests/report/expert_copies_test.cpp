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

std::vector<std::int64_t> hot_rows() {
  std::vector<std::int64_t> rows(32, 4);
  for (std::int32_t r = 0; r < 4; ++r) rows[r * 8] = 40;
  return rows;
}

/// A dispatch in which rank 0 sends 6000 and gets 1000 bytes, after 1 ms; stores take 3 ms.
ExpertCallPrediction dispatch_of() {
  ExpertCallPrediction call;
  call.links.resize(4);
  call.links[0] = {1000, 6000, 0, 0};
  call.begin_seconds = 1e-3;
  call.nvlink_seconds = 6e-3;
  call.block_seconds = 3e-3;
  call.end_seconds = 2e-3;
  call.seconds = 9e-3;
  return call;
}

ExpertCopyCosts costs_of() {
  ExpertCopyCosts costs;
  costs.intermediate = 64;
  costs.gemm_flops_per_second = 1e9;
  costs.links.nvlink_bytes_per_second = 1e6;
  costs.links.network_bytes_per_second = 1e5;
  return costs;
}

TEST(ExpertCopies, PricesCopiesByHand) {
  const ExpertCopies copies = price_expert_copies(config_of(4), hot_rows(), {.spare_experts = 1},
                                                  dispatch_of(), costs_of());
  EXPECT_EQ(copies.rows_before, (std::vector<std::int64_t>{176, 32, 32, 32}));
  EXPECT_EQ(copies.rows_after, (std::vector<std::int64_t>{68, 68, 68, 68}));
  EXPECT_EQ(copies.weight_bytes, 3 * 128 * 64 * 2);
  EXPECT_EQ(copies.gradient_bytes, 3 * 128 * 64 * 4);
  EXPECT_EQ(copies.busiest, 0);
  EXPECT_TRUE(copies.busiest_sends);
  EXPECT_FALSE(copies.network);
  EXPECT_EQ(copies.busiest_weights, 3);
  // 2 operations for each of 3 * 128 * 64 elements and row.
  EXPECT_NEAR(copies.gemm_before, 176 * 2.0 * 3 * 128 * 64 / 1e9, 1e-12);
  EXPECT_NEAR(copies.gemm_after, 68 * 2.0 * 3 * 128 * 64 / 1e9, 1e-12);
  EXPECT_NEAR(copies.weight_seconds, 3 * 49152 / 1e6, 1e-12);
  EXPECT_NEAR(copies.gradient_seconds, 3 * 98304 / 1e6, 1e-12);
  // begin + (weights + 6000 bytes of rows) + end, less the call as it is.
  EXPECT_NEAR(copies.exposed_seconds, 1e-3 + (3 * 49152 + 6000) / 1e6 + 2e-3 - 9e-3, 1e-12);
  EXPECT_NEAR(copies.forward_gain(),
              copies.gemm_before - copies.gemm_after - copies.exposed_seconds, 1e-12);
  EXPECT_NEAR(copies.backward_gain(),
              2 * (copies.gemm_before - copies.gemm_after) - copies.exposed_seconds -
                  copies.gradient_seconds,
              1e-12);
}

TEST(ExpertCopies, CopiesOnAnotherNodeGoOverTheNetwork) {
  const ExpertCopies copies = price_expert_copies(config_of(2), hot_rows(), {.spare_experts = 1},
                                                  dispatch_of(), costs_of());
  EXPECT_TRUE(copies.network);  // two of three, at a tenth of the speed
  EXPECT_EQ(copies.busiest_weights, 2);
  EXPECT_NEAR(copies.weight_seconds, 2 * 49152 / 1e5, 1e-12);
}

TEST(ExpertCopies, ProductsHaveWholeTiles) {
  const ExpertCopies copies = price_expert_copies(
      config_of(4), hot_rows(), {.spare_experts = 1, .alignment = 16}, dispatch_of(), costs_of());
  EXPECT_EQ(copies.tiled_before, 160 + 16);
  std::int64_t most = 0;
  for (std::int32_t r = 0; r < 4; ++r) {
    std::int64_t tiles = 0;
    for (std::int32_t s = 0; s < 3; ++s) tiles += (copies.plan.quotas[r * 3 + s] + 15) / 16 * 16;
    most = std::max(most, tiles);
  }
  EXPECT_EQ(copies.tiled_after, most);
}

TEST(ExpertCopies, WhatStoresHideIsNotExposed) {
  ExpertCallPrediction dispatch = dispatch_of();
  dispatch.block_seconds = 1;
  dispatch.seconds = 1e-3 + 1 + 2e-3;
  const ExpertCopies copies =
      price_expert_copies(config_of(4), hot_rows(), {.spare_experts = 1}, dispatch, costs_of());
  EXPECT_EQ(copies.exposed_seconds, 0);
  EXPECT_GT(copies.weight_seconds, 0.1);
}

TEST(ExpertCopies, WithoutCopiesNothingIsPaid) {
  const std::vector<std::int64_t> even(32, 4);
  const ExpertCopies copies =
      price_expert_copies(config_of(4), even, {.spare_experts = 1}, dispatch_of(), costs_of());
  EXPECT_EQ(copies.weight_seconds, 0);
  EXPECT_EQ(copies.exposed_seconds, 0);
  EXPECT_EQ(copies.forward_gain(), 0);
  EXPECT_EQ(explain_expert_copies(copies, costs_of()).size(), 2);
}

TEST(ExpertCopies, RefusesWhatMakesNoSense) {
  const auto priced = [&](const ExpertCopyCosts& costs, const EvenExpertsOptions& options) {
    return
        [=] { (void)price_expert_copies(config_of(4), hot_rows(), options, dispatch_of(), costs); };
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
  costs.links.nvlink_bytes_per_second = 0;
  EXPECT_TRUE(test::rejects(priced(costs, {}), {"nvlink_bytes_per_second"}));
  EXPECT_TRUE(test::rejects(priced(costs_of(), {.spare_experts = 9}), {"spare_experts = 9"}));
  ExpertCallPrediction none;
  EXPECT_TRUE(test::rejects(
      [&] { (void)price_expert_copies(config_of(4), hot_rows(), {}, none, costs_of()); },
      {"dispatch has 0 ranks, expected 4"}));
}

}  // namespace
}  // namespace waybill
