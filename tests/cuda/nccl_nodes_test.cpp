// Sequences between simulated hosts that NCCL connects over TCP. Ranks are processes; nodes share
// the GPUs, and their kernels take turns: deadlines are long.

#include <gtest/gtest.h>

#include <string>

#include "cuda/gpu_nodes.h"
#include "cuda/gpu_processes.h"
#include "cuda/simulated_hosts.h"
#include "support/expect_error.h"
#include "support/transport_checks.h"

namespace waybill {
namespace {

using test::Death;
using test::DeviceArena;
using test::NodeCase;
using test::SimulatedHosts;
using test::to_size;
using Cases = std::vector<std::unique_ptr<NodeCase>>;
using Views = std::vector<ConstTensorView>;

constexpr double long_timeout_s = 40;

/// Ways that differ in what goes between nodes: many small phases, and few.
void check(World& world, const Cases& cases) {
  DeviceArena arena(world);
  const SequencePlanOptions plans[] = {
      {.relay = RelayUse::always, .batch_bytes = 256, .phase_bytes = 2048},
      {.relay = RelayUse::always}};
  for (const SequencePlanOptions& plan : plans) {
    SequenceDispatcher dispatcher(world, {.num_sms = 8, .plan = plan});
    dispatcher.reserve(std::int64_t{64} << 20, {arena.stream()}, 1 << 12);
    for (const auto& node : cases) {
      const std::string name =
          concat("phases of ", plan.phase_bytes, ", ", node->sample.name, ", rank ", world.rank());
      test::check_gpu_step(world, dispatcher, arena, node->parts(), node->expected, name);
      if (testing::Test::HasFatalFailure()) return;
    }
    world.barrier();
    dispatcher.close();
  }
  world.barrier();
}

void check_cases(const Topology& topology, int num_random, std::int64_t scale) {
  const Cases cases = test::node_cases(topology, num_random, scale);
  test::expect_no_errors(test::run_gpu_processes(
      topology.world_size, SimulatedHosts{topology.ranks_per_node},
      [&](World& world) { check(world, cases); }, long_timeout_s));
}

TEST(NcclNodes, two_nodes_of_one_equal_the_simulation) { check_cases({2, 1}, 16, 3); }
TEST(NcclNodes, two_nodes_of_two_equal_the_simulation) { check_cases({4, 2}, 6, 3); }
TEST(NcclNodes, three_nodes_of_one_equal_the_simulation) { check_cases({3, 1}, 4, 3); }

/// Rows of more than a phase each.
TEST(NcclNodes, large_rows_equal_the_simulation) {
  std::vector<std::vector<std::int64_t>> shards(2, {700, 90, 1});
  test::SequenceCase sample{"large", compute_qkv_routing(test::plain_plan(
                                         2, shards, {1, 0, 1, 0, 1, 1}, KvLayout::per_rank))};
  sample.q.hidden = 4096;
  sample.k.hidden = sample.v.hidden = 1024;
  Cases cases;
  cases.push_back(std::make_unique<NodeCase>(std::move(sample), Topology{2, 1}, RelaySchedule{}));
  test::expect_no_errors(test::run_gpu_processes(
      2, SimulatedHosts{1}, [&](World& world) { check(world, cases); }, long_timeout_s));
}

/// A graph of two dispatches, replayed; its plan stays.
TEST(NcclNodes, a_captured_graph_replays) {
  const auto cases = test::node_cases({2, 1}, 0, 3);
  const NodeCase& node = *cases.at(3);
  test::expect_no_errors(test::run_gpu_processes(
      2, SimulatedHosts{1},
      [&](World& world) {
        const std::size_t r = to_int(world.rank());
        const test::Expected& expected = node.expected;
        DeviceArena arena(world);
        const Stream stream{arena.stream()};
        SequenceDispatcher dispatcher(world, {.num_sms = 8, .local_by_copy_engine = false});
        dispatcher.reserve(std::int64_t{8} << 20, stream);
        const auto parts = node.forward();
        PlanHandle plan = dispatcher.plan_dispatch(parts, stream);
        const Views inputs{arena.upload(expected.q[r]), arena.upload(expected.k[r]),
                           arena.upload(expected.v[r])};
        arena.synchronize();
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        test::cuda_ok(cudaStreamBeginCapture(arena.stream(), cudaStreamCaptureModeThreadLocal));
        (void)dispatcher.dispatch(plan, inputs, stream);
        const auto outputs = dispatcher.dispatch(plan, inputs, stream);
        test::cuda_ok(cudaStreamEndCapture(arena.stream(), &graph));
        test::cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
        for (int replay = 0; replay < 5; ++replay) {
          for (const TensorView& output : outputs) {
            const auto bytes = output.shape[0] * output.shape[1] * dtype_bytes(output.dtype);
            test::cuda_ok(cudaMemsetAsync(output.data, 0x77, bytes, arena.stream()), world);
          }
          test::cuda_ok(cudaGraphLaunch(ready, arena.stream()), world);
          ASSERT_TRUE(test::same_bytes(arena.download(outputs[0]), expected.q_out[r]));
          ASSERT_TRUE(test::same_bytes(arena.download(outputs[1]), expected.k_out[r]));
          ASSERT_TRUE(test::same_bytes(arena.download(outputs[2]), expected.v_out[r]));
        }
        EXPECT_TRUE(test::rejects([&] { dispatcher.replace_plan(plan, parts, stream); },
                                  {"replace_plan: a graph holds", "NCCL"}));
        dispatcher.synchronize(stream);
        world.barrier();
        test::cuda_ok(cudaGraphExecDestroy(ready));
        test::cuda_ok(cudaGraphDestroy(graph));
        dispatcher.close();
      },
      long_timeout_s));
}

TEST(NcclNodes, a_killed_rank_is_named) {
  if (test::num_gpus_seen_by_a_child() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const auto ends = test::run_until_rank_1_dies(2, SimulatedHosts{1}, Death::before_the_third_call);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  EXPECT_TRUE(test::names_timeout(
      ends[0].text, {.operation = "dispatch", .rank = 0, .peer = 1, .wanted = 3, .seen = 2}, 2,
      10));
}

TEST(NcclNodes, a_rank_killed_at_any_time_ends_the_calls_of_the_other) {
  if (test::num_gpus_seen_by_a_child() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const auto ends = test::run_until_rank_1_dies(2, SimulatedHosts{1}, Death::during_some_call);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  // Whichever is first: the deadline of the call, or what NCCL says at the begin of the next one.
  const bool by_deadline = ends[0].text.find("from rank 1") != std::string::npos;
  const bool by_nccl = ends[0].text.find("dispatch: rank 0: NCCL 2.") != std::string::npos;
  EXPECT_TRUE(by_deadline || by_nccl) << ends[0].text;
}

/// Four ranks on two GPUs or fewer: no context is ended, and NCCL's kernels end as they are given
/// up.
TEST(NcclNodes, ranks_that_share_gpus_report_a_killed_one) {
  const auto ends =
      test::run_until_rank_1_dies(4, SimulatedHosts{2}, Death::before_the_third_call, 10);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  for (const std::int32_t r : {0, 2, 3}) {
    const std::string& text = ends[r].text;
    EXPECT_EQ(text.find("still running"), std::string::npos) << text;
    EXPECT_NE(text.find("dispatch: rank"), std::string::npos) << "rank " << r << ": " << text;
  }
}

}  // namespace
}  // namespace waybill
