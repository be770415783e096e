#include <gtest/gtest.h>

#include <algorithm>

#include "schedule/check_sequence_plans.h"
#include "support/plan_replay.h"
#include "support/split_plans.h"

namespace waybill {
namespace {

using test::NodeCase;
using test::PlanReplay;
using test::tensors_of;
using test::to_size;

/// The same hops in another legal order: any of those whose feed stands already comes next.
RelaySchedule shuffled(const RelaySchedule& relay, std::uint64_t seed) {
  Random random(seed);
  RelaySchedule other = relay;
  other.hops.clear();
  std::vector<std::vector<std::size_t>> fed(relay.hops.size());
  std::vector<std::size_t> ready;
  for (std::size_t h = 0; h < relay.hops.size(); ++h) {
    const std::int32_t after = relay.hops[h].after;
    (after < 0 ? ready : fed[after]).push_back(h);
  }
  std::vector<std::int32_t> moved(relay.hops.size());
  while (!ready.empty()) {
    std::swap(ready[random.below(std::ssize(ready))], ready.back());
    const std::size_t next = ready.back();
    ready.pop_back();
    moved[next] = static_cast<std::int32_t>(other.hops.size());
    other.hops.push_back(relay.hops[next]);
    if (other.hops.back().after >= 0) other.hops.back().after = moved[other.hops.back().after];
    ready.insert(ready.end(), fed[next].begin(), fed[next].end());
  }
  return other;
}

std::vector<SequencePlan> plans_of(const NodeCase& node, SequenceOperation operation,
                                   const RelaySchedule& relay) {
  std::vector<SequencePart> parts =
      operation == SequenceOperation::dispatch ? node.forward() : node.kv();
  parts.back().relay = &relay;
  CompileOptions options{.plan = test::eager_options().plan};
  options.ranks_per_node = node.topology.ranks_per_node;
  std::vector<SequencePlan> plans;
  for (std::int32_t r = 0; r < node.topology.world_size; ++r) {
    plans.push_back(operation == SequenceOperation::dispatch
                        ? compile_dispatch(parts, Rank{r}, options)
                        : compile_kv_gradient(parts, Rank{r}, options));
  }
  EXPECT_EQ(test::check_sequence_plans(plans, parts, options.ranks_per_node),
            std::vector<std::string>{});
  return plans;
}

void expect_same_limits(const PlanLimits& got, const PlanLimits& expected) {
  EXPECT_EQ(got.way, expected.way);
  EXPECT_DOUBLE_EQ(got.direct_seconds, expected.direct_seconds);
  EXPECT_DOUBLE_EQ(got.once_per_node_seconds, expected.once_per_node_seconds);
  EXPECT_DOUBLE_EQ(got.relay_seconds, expected.relay_seconds);
}

void expect_same_windows(const SequencePlan& got, const SequencePlan& expected) {
  EXPECT_EQ(got.own_rows, expected.own_rows);
  EXPECT_EQ(got.window_rows, expected.window_rows);
  EXPECT_EQ(got.window_offsets, expected.window_offsets);
  EXPECT_EQ(got.window_bytes, expected.window_bytes);
  EXPECT_EQ(got.wire_bytes, expected.wire_bytes);
}

void expect_same_results(const std::vector<SequencePlan>& got,
                         const std::vector<SequencePlan>& expected) {
  const auto tensors = tensors_of(expected);
  PlanReplay one(expected, tensors);
  PlanReplay other(got, tensors);
  ASSERT_TRUE(one.run());
  ASSERT_TRUE(other.run());
  for (std::size_t r = 0; r < got.size(); ++r) {
    for (std::size_t t = 0; t < got[r].tensors.size(); ++t) {
      const auto begin = static_cast<std::ptrdiff_t>(got[r].window_offsets[t]);
      const auto bytes =
          static_cast<std::ptrdiff_t>(got[r].window_rows[t] * got[r].tensors[t].row_bytes());
      EXPECT_TRUE(std::equal(one.windows[r].begin() + begin, one.windows[r].begin() + begin + bytes,
                             other.windows[r].begin() + begin));
      EXPECT_TRUE(std::ranges::equal(one.outputs[r][t].bytes(), other.outputs[r][t].bytes()));
    }
  }
}

TEST(RelayOrder, limits_windows_and_results_are_the_same_in_every_legal_order) {
  int num_orders = 0;
  for (const Topology topology : {Topology{4, 4}, Topology{4, 2}, Topology{8, 4}, Topology{3, 1}}) {
    for (test::SequenceCase& sample : test::sequence_cases(topology.world_size, 10)) {
      sample.q.dtype = sample.k.dtype = sample.v.dtype = DType::float32;
      const NodeCase node(std::move(sample), topology, {});
      const RelaySchedule relay = test::random_relay(node.sample.routing.fwd_kv, 31);
      for (const auto operation : {SequenceOperation::dispatch, SequenceOperation::kv_gradient}) {
        const auto expected = plans_of(node, operation, relay);
        for (std::uint64_t seed = 1; seed <= 4; ++seed) {
          const RelaySchedule other = shuffled(relay, seed);
          ASSERT_EQ(other.hops.size(), relay.hops.size());
          const auto plans = plans_of(node, operation, other);
          for (std::size_t r = 0; r < plans.size(); ++r) {
            expect_same_limits(plans[r].limits, expected[r].limits);
            expect_same_windows(plans[r], expected[r]);
          }
          expect_same_results(plans, expected);
          ASSERT_FALSE(testing::Test::HasFailure()) << node.sample.name << ", order " << seed;
          num_orders += other.hops == relay.hops ? 0 : 1;
        }
      }
    }
  }
  EXPECT_GT(num_orders, 100);
}

}  // namespace
}  // namespace waybill
