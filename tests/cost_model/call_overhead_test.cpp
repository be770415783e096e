#include <gtest/gtest.h>

#include "waybill/core/error.h"
#include "waybill/cost_model/predict_step.h"

namespace waybill {
namespace {

TEST(CallOverhead, CountsWhatGoesToEachRank) {
  const CallOverhead one_node = call_overhead({8, 8});
  EXPECT_EQ(one_node.node_messages, 7);
  EXPECT_EQ(one_node.network_messages, 0);
  EXPECT_EQ(one_node.bytes_out, 7 * 40);
  EXPECT_EQ(one_node.memory_bytes, 2 * 8 * 40);
  EXPECT_NEAR(one_node.seconds, 11e-6 + 7 * 0.4e-6, 1e-8);
  const CallOverhead nodes = call_overhead({1024, 8});
  EXPECT_EQ(nodes.network_messages, 1016);
  EXPECT_EQ(nodes.bytes_out, 1023 * 40);
  EXPECT_NEAR(nodes.seconds, 11e-6 + 3e-6 + 1016 * 0.3e-6, 1e-5);
}

TEST(CallOverhead, CountsOfExpertsGrowWithRanksTimesExperts) {
  const CallOverhead counting = counting_overhead({1024, 1024}, 1024);
  EXPECT_EQ(counting.bytes_out, 1023LL * (5 + 1024 + 1 + 1024) * 8);
  EXPECT_EQ(counting.memory_bytes, 2LL * 1024 * (5 + 1024 + 1 + 1024) * 8);
  EXPECT_GT(counting.seconds, call_overhead({1024, 1024}).seconds);
  EXPECT_LT(counting_overhead({64, 64}, 256).seconds, 60e-6);
}

TEST(CallOverhead, WrongInputsAreNamed) {
  EXPECT_THROW((void)call_overhead({8, 3}), InvalidArgument);
  EXPECT_THROW((void)call_overhead({8, 8}, {.nvlink_bytes_per_second = 0}), InvalidArgument);
  EXPECT_THROW((void)call_overhead({8, 8}, {.message_seconds = -1}), InvalidArgument);
  EXPECT_THROW((void)call_overhead({8, 8}, {}, {.phase_seconds = -1}), InvalidArgument);
  EXPECT_THROW((void)counting_overhead({8, 8}, 12), InvalidArgument);
}

}  // namespace
}  // namespace waybill
