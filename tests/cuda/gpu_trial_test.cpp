#include "waybill/cuda/gpu_trial.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/random_plan.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/cuda/link_probe.h"

namespace waybill {
namespace {

QkvRouting random_routing(std::int32_t world_size, KvLayout layout, std::uint64_t seed) {
  test::RandomPlanOptions options;
  options.world_size = world_size;
  options.max_shard_len = 300;
  options.max_shards_per_rank = 16;
  options.empty_rank_share = 0;
  options.kv_layout = layout;
  return compute_qkv_routing(test::random_plan(seed, options));
}

std::int64_t total(const SparseMetadata& metadata) {
  std::int64_t rows = 0;
  for (std::int64_t j = 0; j < metadata.num_lines(); ++j) {
    const auto line = static_cast<std::size_t>(j);
    rows += metadata.seq_len[line] * (metadata.copy_end(j) - metadata.copy_begin(j));
  }
  return rows;
}

TEST(GpuTrial, every_byte_arrives) {
  const std::int32_t world = std::max(2, num_gpus());
  for (const KvLayout layout : {KvLayout::per_rank, KvLayout::per_query}) {
    const QkvRouting routing = random_routing(world, layout, 3);
    const GpuTrial trial =
        try_on_gpus(routing, {DType::bfloat16, 512}, {DType::bfloat16, 128}, {.calls = 3});
    ASSERT_EQ(trial.steps.size(), 3);
    EXPECT_TRUE(trial.passed());
    EXPECT_EQ(trial.world_size, world);
    EXPECT_EQ(trial.link_gb_s > 0, num_gpus() > 1);
    const std::int64_t q_bytes = total(routing.fwd_q) * 1024;
    EXPECT_EQ(trial.steps[0].bytes_checked, q_bytes + total(routing.fwd_kv) * 512);
    EXPECT_EQ(trial.steps[1].bytes_checked, q_bytes);
    for (const GpuTrialStep& step : trial.steps) {
      EXPECT_GT(step.median_us, 0);
      EXPECT_EQ(step.link_bytes > 0, num_gpus() > 1) << step.name;
      EXPECT_GT(trial.limit_us(step), 0) << step.name;
    }
  }
}

TEST(GpuTrial, bytes_have_no_sums) {
  const QkvRouting routing = random_routing(2, KvLayout::per_rank, 5);
  const GpuTrial trial =
      try_on_gpus(routing, {DType::float8_e4m3fn, 33}, {DType::uint8, 7}, {.calls = 1});
  EXPECT_EQ(trial.steps.size(), 2);
  EXPECT_TRUE(trial.passed());
}

TEST(GpuTrial, a_wrong_element_is_no_pass) {
  GpuTrial trial;
  trial.steps = {{.name = "Q", .link_bytes = 2'000'000, .local_bytes = 3'000'000},
                 {.name = "K", .elements_wrong = 1}};
  EXPECT_FALSE(trial.passed());
  EXPECT_EQ(trial.limit_us(trial.steps[0]), 0);
  trial.link_gb_s = 100;
  EXPECT_DOUBLE_EQ(trial.limit_us(trial.steps[0]), 20);
  trial.local_gb_s = 200;
  EXPECT_DOUBLE_EQ(trial.limit_us(trial.steps[0]), 30);
  trial.steps.pop_back();
  EXPECT_TRUE(trial.passed());
}

}  // namespace
}  // namespace waybill
