#include "experts/expert_memory.h"

#include <gtest/gtest.h>

#include "waybill/moe/expert_routing.h"

namespace waybill {
namespace {

EPConfig config_of(std::int32_t per_node) {
  EPConfig config;
  config.max_tokens = 100;
  config.hidden = 256;
  config.topk = 4;
  config.num_experts = 16;
  config.world_size = 8;
  config.local_world_size = per_node;
  return config;
}

TEST(ExpertMemory, PartsOfAWindowFollowEachOther) {
  const EPConfig config = config_of(8);
  const auto plain = expert_window_layout(config, {}, 10);
  EXPECT_EQ(plain.rows, 0);
  EXPECT_EQ(plain.tags, 10 * 512);
  EXPECT_EQ(plain.scales, plain.tags + 256);   // 160 bytes of tags, rounded up
  EXPECT_EQ(plain.weights, plain.scales);      // no scales
  EXPECT_EQ(plain.topk, plain.weights + 256);  // 40 bytes
  EXPECT_EQ(plain.total, plain.topk);
  const auto compact =
      expert_window_layout(config, {.rows = EPRows::compact, .payload = EPPayload::quantized}, 10);
  EXPECT_EQ(compact.tags, 10 * 256);
  EXPECT_EQ(compact.weights, compact.scales + 256);  // 80 bytes of scales
  EXPECT_EQ(compact.topk, compact.weights + 256);    // 160 bytes
  EXPECT_EQ(compact.total, compact.topk + 256);
}

TEST(ExpertMemory, TheWorkspaceForwardsOnlyBetweenNodes) {
  const auto one = expert_workspace_layout(config_of(8), {});
  EXPECT_EQ(one.counts[1], 1024);  // 8 ranks x 25 counts x 4 bytes, rounded up
  EXPECT_EQ(one.total, 2048);
  const auto two = expert_workspace_layout(config_of(4), {});
  EXPECT_EQ(two.forward_rows, 2048);
  EXPECT_EQ(two.forward_scales, 2048 + 200 * 512);
  EXPECT_EQ(two.forward_ids - two.forward_weights, 3328);  // 200 x 4 x 4 bytes, rounded up
  EXPECT_EQ(two.sums - two.partial_sums, 200 * 512);
  EXPECT_EQ(two.total - two.sums, 200 * 512);
}

}  // namespace
}  // namespace waybill
