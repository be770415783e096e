#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "support/plan_replay.h"
#include "support/split_plans.h"

namespace waybill {
namespace {

using test::NodeCase;
using test::PlanReplay;
using test::plans_of;
using test::tensors_of;
using test::to_size;

/// Everything that a batch does stays on the node; puts leave it, from inside the window.
void expect_apart(const SequencePlan& plan, const Topology& topology) {
  const Node home = topology.node(plan.rank);
  for (const std::uint64_t address : plan.segment_addresses)
    EXPECT_EQ(topology.node(Rank{static_cast<std::int32_t>(address >> address_rank_shift)}), home);
  for (const BatchSlot& slot : plan.signals)
    EXPECT_TRUE(slot.rank == plan.world_size || topology.node(Rank{slot.rank}) == home);
  std::int32_t next = 0;
  for (const NetworkStep& step : plan.network.steps) {
    EXPECT_EQ(step.first_put, next);
    EXPECT_GT(step.num_puts, 0);
    next += step.num_puts;
  }
  EXPECT_EQ(next, std::ssize(plan.network.puts));
  for (const NetworkPut& put : plan.network.puts) {
    EXPECT_NE(topology.node(Rank{put.peer}), home);
    EXPECT_LE(put.size_bytes, max_put_bytes);
    EXPECT_LE(put.from_bytes + put.size_bytes, plan.window_bytes);
  }
  for (const BatchSlot& slot : plan.network.signals)
    EXPECT_NE(topology.node(Rank{slot.rank}), home);
}

/// @return puts of all ranks
std::int64_t check_split(const NodeCase& node, SequenceOperation operation,
                         std::int64_t batch_bytes) {
  const auto whole = plans_of(
      node, operation, {.plan = {.batch_bytes = batch_bytes}, .separate_local_copies = true});
  const auto split = plans_of(
      node, operation,
      {.plan = {.batch_bytes = batch_bytes}, .separate_local_copies = true, .split_network = true});
  const auto tensors = tensors_of(whole);
  PlanReplay expected(whole, tensors);
  PlanReplay got(split, tensors);
  EXPECT_TRUE(expected.run());
  EXPECT_TRUE(got.run()) << node.sample.name;
  std::int64_t puts = 0;
  for (std::size_t r = 0; r < whole.size(); ++r) {
    EXPECT_EQ(split[r].window_offsets, whole[r].window_offsets);
    EXPECT_EQ(split[r].num_slots, whole[r].num_slots);
    EXPECT_GE(split[r].window_bytes, whole[r].window_bytes);
    for (std::size_t t = 0; t < whole[r].tensors.size(); ++t) {
      const std::size_t begin = whole[r].window_offsets[t];
      const std::size_t bytes = whole[r].window_rows[t] * whole[r].tensors[t].row_bytes();
      EXPECT_TRUE(
          std::equal(expected.windows[r].begin() + static_cast<std::ptrdiff_t>(begin),
                     expected.windows[r].begin() + static_cast<std::ptrdiff_t>(begin + bytes),
                     got.windows[r].begin() + static_cast<std::ptrdiff_t>(begin)))
          << node.sample.name << ", rank " << r << ", tensor " << t;
      EXPECT_TRUE(std::ranges::equal(expected.outputs[r][t].bytes(), got.outputs[r][t].bytes()))
          << node.sample.name << ", rank " << r << ", tensor " << t;
    }
    expect_apart(split[r], node.topology);
    puts += std::ssize(split[r].network.puts);
  }
  return puts;
}

TEST(NetworkProgram, split_plans_do_what_whole_ones_do) {
  std::int64_t puts = 0;
  for (const Topology topology : {Topology{4, 2}, Topology{8, 4}, Topology{8, 2}, Topology{3, 1}}) {
    for (const auto& node : test::node_cases(topology, 16)) {
      for (const std::int64_t batch_bytes : {256, 0}) {
        for (const auto operation : {SequenceOperation::dispatch, SequenceOperation::kv_gradient}) {
          puts += check_split(*node, operation, batch_bytes);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(puts, 1000);
}

TEST(NetworkProgram, on_one_node_there_is_none) {
  for (const auto& node : test::node_cases({4, 4}, 8)) {
    for (const auto operation : {SequenceOperation::dispatch, SequenceOperation::kv_gradient})
      EXPECT_EQ(check_split(*node, operation, 256), 0);
  }
}

/// Rows that stay on their rank go by copies of their own, where they are many.
TEST(NetworkProgram, local_rows_stay_apart) {
  const Topology topology{4, 2};
  const std::vector<std::vector<std::int64_t>> shards(4, {900, 40, 7});
  test::SequenceCase sample{
      "long", compute_qkv_routing(test::plain_plan(4, shards, {0, 1, 2, 1, 3, 3, 2, 2, 0, 3, 0, 1},
                                                   KvLayout::per_rank))};
  sample.q = {DType::float32, 2048};
  const NodeCase node(std::move(sample), topology, {});
  const auto plans = plans_of(node, SequenceOperation::dispatch,
                              {.separate_local_copies = true, .split_network = true});
  EXPECT_FALSE(plans[0].local_segments.empty());
  EXPECT_GT(check_split(node, SequenceOperation::dispatch, 0), 4);
}

/// Rank 0 sends `lengths` to rank 1, each on a node of its own, where they lie one after another
/// in the order of `at_rank_1`.
SequencePlan sent_to_rank_1(const std::vector<std::int64_t>& lengths,
                            std::int64_t batch_bytes = 0) {
  std::vector<std::int32_t> dst(lengths.size(), 1);
  const QkvRouting routing =
      compute_qkv_routing(test::plain_plan(2, {lengths, {}}, dst, KvLayout::per_rank));
  const std::vector<SequencePart> parts{{&routing.fwd_q, {{DType::float32, 64}}}};
  return compile_dispatch(
      parts, Rank{0},
      {.plan = {.batch_bytes = batch_bytes}, .ranks_per_node = 1, .split_network = true});
}

TEST(NetworkProgram, adjacent_rows_are_one_put) {
  const SequencePlan plan = sent_to_rank_1({10, 20, 3, 40});
  ASSERT_EQ(plan.network.puts.size(), 1U);
  EXPECT_EQ(plan.network.puts[0].size_bytes, 73 * 256);
  EXPECT_EQ(plan.network.puts[0].peer, 1);
  EXPECT_EQ(plan.network.puts[0].to_bytes, 0);
  EXPECT_EQ(plan.network.stage_bytes, 73 * 256);
  EXPECT_EQ(plan.window_bytes, 73 * 256);  // of rank 0 its stage, of rank 1 its rows
  EXPECT_EQ(plan.network.num_ready, 1);
}

TEST(NetworkProgram, rows_that_nobody_waits_for_go_in_pieces) {
  const SequencePlan plan = sent_to_rank_1({2000, 2000, 2000}, std::int64_t{64} << 10);
  std::int64_t bytes = 0;
  for (const NetworkPut& put : plan.network.puts) bytes += put.size_bytes;
  EXPECT_EQ(bytes, 6000 * 256);
  EXPECT_GE(plan.network.steps.size(), 6U);  // segments are of at most 256 KiB
  EXPECT_EQ(plan.network.num_ready, std::ssize(plan.network.steps));
}

}  // namespace
}  // namespace waybill
