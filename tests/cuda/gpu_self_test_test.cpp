#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/self_test/self_test.h"
#include "support/random_plan.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill {
namespace {

QkvRouting random_routing(std::int32_t world_size, KvLayout layout, std::uint64_t seed) {
  test::RandomPlanOptions options;
  options.world_size = world_size;
  options.max_shard_len = 300;
  options.max_shards_per_rank = 16;
  options.empty_rank_share = 0;
  options.edge_share = 0;
  options.kv_layout = layout;
  return compute_qkv_routing(test::random_plan(seed, options));
}

std::int64_t total(const SparseMetadata& metadata) {
  std::int64_t rows = 0;
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    const auto entry = static_cast<std::size_t>(j);
    rows += metadata.seq_len[entry] * (metadata.destination_end(j) - metadata.destination_begin(j));
  }
  return rows;
}

TEST(GpuSelfTest, every_byte_arrives) {
  const std::int32_t world = std::max(2, num_gpus());
  for (const KvLayout layout : {KvLayout::per_rank, KvLayout::per_query}) {
    const QkvRouting routing = random_routing(world, layout, 3);
    const GpuSelfTest self_test =
        try_on_gpus(routing, {DType::bfloat16, 512}, {DType::bfloat16, 128}, {.calls = 3});
    ASSERT_EQ(self_test.steps.size(), 3);
    EXPECT_TRUE(self_test.passed());
    EXPECT_EQ(self_test.world_size, world);
    EXPECT_EQ(self_test.link_gb_s > 0, num_gpus() > 1);
    const std::int64_t q_bytes = total(routing.fwd_q) * 1024;
    EXPECT_EQ(self_test.steps[0].bytes_checked, q_bytes + total(routing.fwd_kv) * 512);
    EXPECT_EQ(self_test.steps[1].bytes_checked, q_bytes);
    for (const GpuSelfTestStep& step : self_test.steps) {
      EXPECT_GT(step.median_us, 0);
      EXPECT_EQ(step.link_bytes > 0, num_gpus() > 1) << step.name;
      EXPECT_GT(self_test.limit_us(step), 0) << step.name;
    }
  }
}

TEST(GpuSelfTest, bytes_have_no_sums) {
  const QkvRouting routing = random_routing(2, KvLayout::per_rank, 5);
  const GpuSelfTest self_test =
      try_on_gpus(routing, {DType::float8_e4m3fn, 33}, {DType::uint8, 7}, {.calls = 1});
  EXPECT_EQ(self_test.steps.size(), 2);
  EXPECT_TRUE(self_test.passed());
}

TEST(GpuSelfTest, a_wrong_element_is_no_pass) {
  GpuSelfTest self_test;
  self_test.steps = {{.name = "Q", .link_bytes = 2'000'000, .local_bytes = 3'000'000},
                     {.name = "K", .elements_wrong = 1}};
  EXPECT_FALSE(self_test.passed());
  EXPECT_EQ(self_test.limit_us(self_test.steps[0]), 0);
  self_test.link_gb_s = 100;
  EXPECT_DOUBLE_EQ(self_test.limit_us(self_test.steps[0]), 20);
  self_test.local_gb_s = 200;
  EXPECT_DOUBLE_EQ(self_test.limit_us(self_test.steps[0]), 30);
  self_test.steps.pop_back();
  EXPECT_TRUE(self_test.passed());
}

}  // namespace
}  // namespace waybill
