#include <gtest/gtest.h>

#include <vector>

#include "support/expect_error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/moe/ep_config.h"
#include "waybill/moe/expert_routing.h"

namespace waybill::test {
namespace {

/// Two nodes of one rank, an expert each; more tokens than a tile of 256 has.
EPConfig two_nodes() {
  EPConfig config;
  config.max_tokens = 600;
  config.hidden = 8;
  config.topk = 1;
  config.num_experts = 2;
  config.world_size = 2;
  config.local_world_size = 1;
  return config;
}

struct Range {
  std::int32_t slot;
  std::int32_t first;
  std::int32_t end;
  friend bool operator==(const Range&, const Range&) = default;
};

/// The ranges of tokens that rank 0 sends to node 1.
std::vector<Range> ranges_of(const std::vector<std::int32_t>& ids) {
  const EPConfig config = two_nodes();
  const std::vector<std::int32_t> found = node_send_requests(config, 0, ids);
  std::vector<Range> ranges;
  for (std::int32_t slot = 0; slot < config.max_tokens; ++slot) {
    const std::int32_t first = found[2 * config.max_tokens + slot];
    const std::int32_t end = found[3 * config.max_tokens + slot];
    EXPECT_EQ(first < 0, end < 0);
    if (first >= 0) ranges.push_back({slot, first, end});
  }
  return ranges;
}

TEST(NodeRanges, EndWithTheirTile) {
  const std::vector<Range> all = {{0, 0, 256}, {256, 256, 512}, {512, 512, 600}};
  EXPECT_EQ(ranges_of(std::vector<std::int32_t>(600, 1)), all);
}

TEST(NodeRanges, EndWhereATokenStays) {
  std::vector<std::int32_t> ids(600, 0);
  for (const int token : {3, 4, 255, 256, 599}) ids[token] = 1;
  const std::vector<Range> some = {{0, 3, 5}, {1, 255, 256}, {256, 256, 257}, {512, 599, 600}};
  EXPECT_EQ(ranges_of(ids), some);
}

TEST(RecvRows, OfAllRanksAndTopkSlots) {
  EPConfig config = two_nodes();
  config.topk = 3;
  config.num_experts = 8;
  EXPECT_EQ(most_recv_rows(config, {}), 2 * 600 * 3);
  EXPECT_EQ(most_recv_rows(config, {.expert_alignment = 16}), 2 * 600 * 3 + 4 * 15);
  EXPECT_EQ(most_recv_rows(config, {.rows = EPRows::compact}), 2 * 600);
}

TEST(ExpertIds, OfMaxTokensAtMost) {
  const EPConfig config = two_nodes();
  const HostTensor most(DType::int32, Shape{600, 1});
  EXPECT_EQ(read_expert_ids(config, {}, most.view(), "test").size(), 600U);
  const HostTensor one_more(DType::int32, Shape{601, 1});
  EXPECT_TRUE(rejects([&] { (void)read_expert_ids(config, {}, one_more.view(), "test"); },
                      {"test: exp_indices has 601 tokens, expected at most max_tokens = 600"}));
}

}  // namespace
}  // namespace waybill::test
