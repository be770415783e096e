// Several logical nodes on the GPUs of one host: between them goes nothing but what the network
// path puts.

#include "cuda/gpu_nodes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/gpu_processes.h"
#include "cuda/stalled_rank.h"
#include "support/expect_error.h"
#include "support/transport_checks.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill {
namespace {

using test::DeviceArena;
using test::NodeCase;
using test::to_size;
using Views = std::vector<ConstTensorView>;

ThreadWorldOptions on_nodes(const Topology& topology) {
  ThreadWorldOptions options = test::world_options();
  options.ranks_per_node = topology.ranks_per_node;
  return options;
}

void check_threads(const Topology& topology, int num_random, std::int64_t scale) {
  const auto cases = test::node_cases(topology, num_random, scale);
  run_gpu_thread_world(
      topology.world_size, [&](World& world) { test::check_gpu_nodes(world, cases); },
      on_nodes(topology));
}

TEST(GpuNodes, two_nodes_of_one_equal_the_simulation) { check_threads({2, 1}, 16, 3); }
TEST(GpuNodes, two_nodes_of_two_equal_the_simulation) { check_threads({4, 2}, 16, 5); }
TEST(GpuNodes, two_nodes_of_four_equal_the_simulation) { check_threads({8, 4}, 8, 3); }
TEST(GpuNodes, four_nodes_of_two_equal_the_simulation) { check_threads({8, 2}, 8, 3); }

TEST(GpuNodes, processes_equal_the_simulation) {
  for (const Topology topology : {Topology{2, 1}, Topology{4, 2}}) {
    const auto cases = test::node_cases(topology, 8, 3);
    test::expect_no_errors(test::run_gpu_processes(
        topology.world_size,
        [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
          return make_gpu_process_world(std::move(bootstrap), device, topology.ranks_per_node);
        },
        [&](World& world) { test::check_gpu_nodes(world, cases); }));
  }
}

/// Rows of more than a put each, so that steps have many, and documents of thousands of tokens.
TEST(GpuNodes, large_rows_equal_the_simulation) {
  const Topology topology{4, 2};
  std::vector<std::vector<std::int64_t>> shards(4, {700, 90, 1});
  std::vector<std::int32_t> dst;
  for (int i = 0; i < 12; ++i) dst.push_back((i * 7 + 2) % 4);
  test::SequenceCase sample{
      "large", compute_qkv_routing(test::plain_plan(4, shards, dst, KvLayout::per_rank))};
  sample.q.hidden = 4096;
  sample.k.hidden = sample.v.hidden = 1024;
  std::vector<std::unique_ptr<NodeCase>> cases;
  cases.push_back(std::make_unique<NodeCase>(std::move(sample), topology, RelaySchedule{}));
  run_gpu_thread_world(
      4, [&](World& world) { test::check_gpu_nodes(world, cases); }, on_nodes(topology));
}

/// A dispatch and a gradient in a graph, replayed with plan after plan.
TEST(GpuNodes, a_captured_graph_replays_with_a_new_plan) {
  const Topology topology{4, 2};
  std::vector<std::unique_ptr<NodeCase>> cases;
  for (std::uint64_t seed = 1; cases.size() < 3; ++seed) {
    test::RandomPlanOptions options;
    options.world_size = 4;
    options.max_shard_len = 30;
    options.edge_share = 0;
    test::SequenceCase sample{concat("plan ", seed),
                              compute_qkv_routing(test::random_plan(seed, options))};
    cases.push_back(std::make_unique<NodeCase>(std::move(sample), topology, RelaySchedule{}, seed));
  }
  const std::vector<std::vector<std::int64_t>> many(4, {400, 400});
  const NodeCase room({"room", compute_qkv_routing(test::plain_plan(
                                   4, many, {1, 2, 3, 0, 1, 2, 3, 0}, KvLayout::per_rank))},
                      topology, {});
  run_gpu_thread_world(
      4,
      [&](World& world) {
        const std::size_t r = to_int(world.rank());
        DeviceArena arena(world);
        const Stream stream{arena.stream()};
        SequenceDispatcher dispatcher(world, {.num_sms = 8, .local_by_copy_engine = false});
        dispatcher.reserve(std::int64_t{8} << 20, stream);
        PlanHandle plan = dispatcher.plan_dispatch(room.forward(), stream);
        // A graph keeps the places to which it copies gradients: one tensor has the same in all.
        const auto keys = [](const NodeCase& node) {
          return std::vector<SequencePart>{{&node.sample.routing.fwd_kv, {node.sample.k}}};
        };
        const auto room_keys = keys(room);
        PlanHandle back = dispatcher.plan_kv_gradient(room_keys, stream);
        constexpr DType dtype = DType::bfloat16;
        const std::vector<TensorView> inputs{arena.take(dtype, {800, 64}),
                                             arena.take(dtype, {800, 32}),
                                             arena.take(dtype, {800, 32})};
        const std::vector<TensorView> grads{
            arena.take(dtype, {room.expected.k_out[r].shape()[0], 32})};
        const std::vector<TensorView> sums{arena.take(dtype, {800, 32})};
        arena.synchronize();
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        test::cuda_ok(cudaStreamBeginCapture(arena.stream(), cudaStreamCaptureModeThreadLocal));
        const std::byte* const window =
            dispatcher.dispatch(plan, Views(inputs.begin(), inputs.end()), stream)[0].data;
        dispatcher.kv_gradient(back, Views(grads.begin(), grads.end()), sums, stream);
        test::cuda_ok(cudaStreamEndCapture(arena.stream(), &graph));
        test::cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
        for (int replay = 0; replay < 9; ++replay) {
          const NodeCase& node = *cases[replay / 3];
          const test::Expected& expected = node.expected;
          dispatcher.replace_plan(plan, node.forward(), stream);
          dispatcher.replace_plan(back, keys(node), stream);
          const auto upload = [&](const TensorView& to, const HostTensor& from) {
            arena.copy(to.data, from.bytes().data(), from.size_bytes());
          };
          upload(inputs[0], expected.q[r]);
          upload(inputs[1], expected.k[r]);
          upload(inputs[2], expected.v[r]);
          upload(grads[0], expected.k_out[r]);
          test::cuda_ok(cudaGraphLaunch(ready, arena.stream()), world);
          const TensorView k_out(const_cast<std::byte*>(window) + plan.window_offsets()[1], dtype,
                                 expected.k_out[r].shape());
          const TensorView dk(sums[0].data, dtype, expected.k[r].shape());
          ASSERT_TRUE(test::same_bytes(arena.download(k_out), expected.k_out[r]))
              << "replay " << replay;
          ASSERT_TRUE(test::same_bytes(arena.download(dk), expected.k_gradient[r]))
              << "replay " << replay;
        }
        dispatcher.synchronize(stream);
        world.barrier();
        test::cuda_ok(cudaGraphExecDestroy(ready));
        test::cuda_ok(cudaGraphDestroy(graph));
      },
      on_nodes(topology));
}

TEST(GpuNodes, copy_engines_are_refused) {
  run_gpu_thread_world(
      2,
      [](World& world) {
        EXPECT_TRUE(test::rejects([&] { SequenceDispatcher dispatcher(world, {.num_sms = 0}); },
                                  {"num_sms = 0 on 2 nodes, expected at least 1"}));
      },
      on_nodes({2, 1}));
}

/// All ranks send to all; rank 1 makes no third call. Whoever waits for it says so; ranks that wait
/// for those, too, may name them.
TEST(GpuNodes, a_rank_that_never_calls_is_named) {
  const auto sample = test::sequence_cases(4, 0).at(3);
  const auto results = test::stall_at_the_third_call(sample, 4, 2);
  int named = 0;
  for (const std::int32_t r : {0, 2, 3}) {
    const std::string& text = results[r].text;
    EXPECT_NE(text.find("waited"), std::string::npos) << "rank " << r << ": " << text;
    EXPECT_NE(text.find("for signal >= 3 from rank"), std::string::npos) << text;
    EXPECT_NE(text.find("last seen 2"), std::string::npos) << text;
    if (text.find("from rank 1") != std::string::npos) ++named;
  }
  EXPECT_GE(named, 1);
}

TEST(GpuNodes, a_killed_process_is_named) {
  if (test::num_gpus_seen_by_a_child() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const auto ends = test::run_until_rank_1_dies(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_gpu_process_world(std::move(bootstrap), device, 1);
      },
      test::Death::before_the_third_call);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  EXPECT_TRUE(test::names_timeout(
      ends[0].text, {.operation = "dispatch", .rank = 0, .peer = 1, .wanted = 3, .seen = 2}, 2,
      10));
}

}  // namespace
}  // namespace waybill
