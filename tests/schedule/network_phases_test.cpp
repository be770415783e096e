
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

#include "support/plan_replay.h"
#include "support/split_plans.h"

namespace waybill {
namespace {

using test::NodeCase;
using test::PlanReplay;
using test::plans_of;
using test::tensors_of;
using test::to_size;

constexpr SequenceOperation operations[] = {SequenceOperation::dispatch,
                                            SequenceOperation::kv_gradient};

/// What the phases leave in windows and outputs is what the steps do, and all ranks come to their
/// end although each phase waits for all whom it concerns.
/// @return phases of all ranks
std::int64_t check_phases(const NodeCase& node, SequenceOperation operation,
                          std::int64_t phase_bytes) {
  const auto plans = plans_of(node, operation,
                              {.plan = {.batch_bytes = 256, .phase_bytes = phase_bytes},
                               .split_network = true,
                               .two_sided_network = true});
  const auto tensors = tensors_of(plans);
  PlanReplay expected(plans, tensors);
  PlanReplay got(plans, tensors, PlanReplay::Network::phases);
  EXPECT_TRUE(expected.run());
  EXPECT_TRUE(got.run()) << node.sample.name;
  std::int64_t phases = 0;
  for (std::size_t r = 0; r < plans.size(); ++r) {
    EXPECT_TRUE(std::ranges::equal(expected.windows[r], got.windows[r]))
        << node.sample.name << ", rank " << r;
    for (std::size_t t = 0; t < plans[r].tensors.size(); ++t) {
      EXPECT_TRUE(std::ranges::equal(expected.outputs[r][t].bytes(), got.outputs[r][t].bytes()))
          << node.sample.name << ", rank " << r << ", tensor " << t;
    }
    phases += std::ssize(plans[r].phases);
  }
  return phases;
}

TEST(NetworkPhases, do_what_the_steps_do) {
  std::int64_t phases = 0;
  for (const Topology topology : {Topology{4, 2}, Topology{8, 4}, Topology{8, 2}, Topology{3, 1}}) {
    for (const auto& node : test::node_cases(topology, 16)) {
      for (const std::int64_t phase_bytes : {300, 1 << 20}) {
        for (const auto operation : operations) {
          phases += check_phases(*node, operation, phase_bytes);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(phases, 8'000);
}

/// Numbers grow; between two ranks there are the same phases with pieces of the same sizes; every
/// rank hears once of each on another node.
void expect_paired(const std::vector<SequencePlan>& plans, const Topology& topology) {
  using Message = std::pair<std::int64_t, std::int64_t>;  // phase, bytes
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<Message>> sent;
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<Message>> received;
  for (const SequencePlan& plan : plans) {
    const std::int32_t me = to_int(plan.rank);
    std::vector<std::int32_t> arrived;
    for (std::size_t i = 0; i < plan.phases.size(); ++i) {
      const NetworkPhase& phase = plan.phases[i];
      if (i > 0) {
        EXPECT_GT(phase.number, plan.phases[i - 1].number);
      }
      for (const NetworkPiece& piece : phase.sent)
        sent[{me, piece.peer}].emplace_back(phase.number, piece.size_bytes);
      for (const NetworkPiece& piece : phase.received)
        received[{piece.peer, me}].emplace_back(phase.number, piece.size_bytes);
      arrived.insert(arrived.end(), phase.arrived.begin(), phase.arrived.end());
    }
    std::ranges::sort(arrived);
    std::vector<std::int32_t> others;
    for (std::int32_t r = 0; r < plan.world_size; ++r)
      if (topology.node(Rank{r}) != topology.node(plan.rank)) others.push_back(r);
    EXPECT_EQ(arrived, others);
  }
  EXPECT_EQ(sent, received);
  for (const auto& [ranks, messages] : sent)
    EXPECT_NE(topology.node(Rank{ranks.first}), topology.node(Rank{ranks.second}));
}

TEST(NetworkPhases, both_sides_have_the_same) {
  for (const Topology topology : {Topology{4, 2}, Topology{6, 1}, Topology{8, 2}}) {
    for (const auto& node : test::node_cases(topology, 8)) {
      for (const auto operation : operations) {
        expect_paired(
            plans_of(*node, operation, {.split_network = true, .two_sided_network = true}),
            node->topology);
      }
    }
  }
}

TEST(NetworkPhases, on_one_node_there_are_none) {
  for (const auto& node : test::node_cases({4, 4}, 4)) {
    for (const auto operation : operations) {
      for (const SequencePlan& plan :
           plans_of(*node, operation, {.split_network = true, .two_sided_network = true}))
        EXPECT_TRUE(plan.phases.empty());
    }
  }
}

}  // namespace
}  // namespace waybill
