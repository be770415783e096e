#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/device_arena.h"
#include "cuda/gpu_step.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill {
namespace {

using test::cuda_ok;
using test::DeviceArena;
using test::Expected;
using test::same_bytes;
using test::SequenceCase;
using test::to_size;
using test::Way;
using test::ways;
using Views = std::vector<ConstTensorView>;

void check_cases(std::int32_t world_size, int num_random, std::int64_t scale) {
  const test::CasesOnGpu cases(world_size, num_random, scale);
  run_gpu_thread_world(
      world_size, [&](World& world) { cases.check(world); }, test::world_options());
}

TEST(GpuSequence, one_rank_equals_the_simulation) { check_cases(1, 8, 1); }
TEST(GpuSequence, two_ranks_equal_the_simulation) { check_cases(2, 24, 1); }
TEST(GpuSequence, four_ranks_equal_the_simulation) { check_cases(4, 24, 7); }
TEST(GpuSequence, eight_ranks_equal_the_simulation) { check_cases(8, 16, 3); }

TEST(GpuSequence, inputs_may_be_strided_and_unaligned) {
  const auto cases = test::sequence_cases(4, 16, 3);
  std::vector<Expected> expected;
  for (const SequenceCase& sample : cases) expected.emplace_back(sample);
  run_gpu_thread_world(
      4,
      [&](World& world) {
        DeviceArena arena(world);
        const Stream stream{arena.stream()};
        const std::size_t r = to_int(world.rank());
        for (const Way& way : ways(world.world_size())) {
          SequenceDispatcher dispatcher(world, way.options);
          dispatcher.reserve(std::int64_t{16} << 20, stream);
          for (std::size_t i = 0; i < cases.size(); ++i) {
            const SequenceCase& sample = cases[i];
            const std::vector<SequencePart> parts{{&sample.routing.fwd_q, {sample.q}}};
            const auto plan = dispatcher.plan_dispatch(parts, stream);
            const std::int64_t element = dtype_bytes(sample.q.dtype);
            const std::int64_t rows = expected[i].q[r].shape()[0];
            for (const std::int64_t extra : {8, 5}) {  // elements between the rows
              arena.reset();
              const TensorView wide = arena.take(sample.q.dtype, {rows, sample.q.hidden + extra});
              ConstTensorView view = wide;
              view.data += extra * element;
              view.shape = {rows, sample.q.hidden};
              for (std::int64_t row = 0; row < rows; ++row) {
                arena.copy(wide.data + (row * (sample.q.hidden + extra) + extra) * element,
                           expected[i].q[r].bytes().data() + row * sample.q.row_bytes(),
                           sample.q.row_bytes());
              }
              if (rows > 0) view.shape[0] = rows;
              const auto outputs = dispatcher.dispatch(plan, Views{view}, stream);
              ASSERT_TRUE(same_bytes(arena.download(outputs[0]), expected[i].q_out[r]))
                  << way.name << ", " << sample.name << ", " << extra << " elements apart";
            }
          }
          world.barrier();
          dispatcher.close();
        }
      },
      test::world_options());
}

/// Many calls are queued without a host wait in between; each output is copied on the stream and
/// looked at only in the end.
TEST(GpuSequence, calls_follow_each_other_without_barriers_and_with_late_ranks) {
  const auto cases = test::sequence_cases(4, 12, 5);
  std::vector<Expected> expected;
  for (std::size_t i = 0; i < cases.size(); ++i) expected.emplace_back(cases[i], 100 * i);
  run_gpu_thread_world(
      4,
      [&](World& world) {
        DeviceArena arena(world);
        const Stream stream{arena.stream()};
        const std::size_t r = to_int(world.rank());
        Random random(r);
        for (const Way& way : ways(world.world_size())) {
          arena.reset();
          SequenceDispatcher dispatcher(world, way.options);
          dispatcher.reserve(std::int64_t{16} << 20, stream);
          std::vector<PlanHandle> plans;
          std::vector<Views> inputs;
          for (std::size_t i = 0; i < cases.size(); ++i) {
            plans.push_back(dispatcher.plan_dispatch(test::forward_parts(cases[i]), stream));
            inputs.push_back({arena.upload(expected[i].q[r]), arena.upload(expected[i].k[r]),
                              arena.upload(expected[i].v[r])});
          }
          std::vector<std::pair<std::size_t, TensorView>> seen;
          for (int round = 0; round < 4; ++round) {
            for (std::size_t i = 0; i < cases.size(); ++i) {
              if (random.below(5) == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
              }
              const auto outputs = dispatcher.dispatch(plans[i], inputs[i], stream);
              const TensorView copy = arena.take(outputs[1].dtype, outputs[1].shape);
              arena.copy(copy.data, outputs[1].data, expected[i].k_out[r].size_bytes());
              seen.emplace_back(i, copy);
            }
          }
          dispatcher.synchronize(stream);
          for (std::size_t s = 0; s < seen.size(); ++s) {
            const auto& [i, copy] = seen[s];
            ASSERT_TRUE(same_bytes(arena.download(copy), expected[i].k_out[r]))
                << way.name << ", call " << s << ", " << cases[i].name;
          }
          world.barrier();
          dispatcher.close();
        }
      },
      test::world_options());
}

TEST(GpuSequence, sums_of_16_bit_gradients_may_stay_float32) {
  auto sample = test::sequence_cases(4, 4, 3).back();
  sample.k = {DType::bfloat16, 128};
  sample.v = {DType::bfloat16, 64};
  const Expected expected(sample);
  const auto dk = test::simulated_gradient(sample.routing, expected.k_out, DType::float32);
  const auto dv = test::simulated_gradient(sample.routing, expected.v_out, DType::float32);
  run_gpu_thread_world(
      4,
      [&](World& world) {
        DeviceArena arena(world);
        const Stream stream{arena.stream()};
        const std::size_t r = to_int(world.rank());
        SequenceDispatcher dispatcher(world);
        const auto plan = dispatcher.plan_kv_gradient(test::kv_parts(sample), stream);
        const auto places = dispatcher.gradient_inputs(plan, stream);  // written there: no copy
        arena.copy(places[0].data, expected.k_out[r].bytes().data(),
                   expected.k_out[r].size_bytes());
        arena.copy(places[1].data, expected.v_out[r].bytes().data(),
                   expected.v_out[r].size_bytes());
        const std::vector<TensorView> sums{arena.take(DType::float32, expected.k[r].shape()),
                                           arena.take(DType::float32, expected.v[r].shape())};
        dispatcher.kv_gradient(plan, Views{places[0], places[1]}, sums, stream);
        ASSERT_TRUE(same_bytes(arena.download(sums[0]), dk[r]));
        ASSERT_TRUE(same_bytes(arena.download(sums[1]), dv[r]));
        dispatcher.synchronize(stream);
        world.barrier();
      },
      test::world_options());
}

/// Two calls are captured once and replayed with other data, then with another plan.
TEST(GpuSequence, a_captured_graph_replays_with_a_new_plan) {
  constexpr std::int32_t world_size = 4;
  std::vector<SequenceCase> cases;
  for (std::uint64_t seed = 1; cases.size() < 3; ++seed) {
    test::RandomPlanOptions options;
    options.world_size = world_size;
    options.max_shard_len = 30;
    options.edge_share = 0;
    cases.push_back({concat("plan ", seed), compute_qkv_routing(test::random_plan(seed, options))});
  }
  std::vector<Expected> expected;
  for (const SequenceCase& sample : cases) expected.emplace_back(sample);
  // Room for the largest: a dense plan of the same world.
  const std::vector<std::vector<std::int64_t>> many(world_size, {400, 400});
  const SequenceCase room{
      "room", compute_qkv_routing(test::plain_plan(world_size, many, {1, 2, 3, 0, 1, 2, 3, 0},
                                                   KvLayout::per_rank))};
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        DeviceArena arena(world);
        const Stream stream{arena.stream()};
        const std::size_t r = to_int(world.rank());
        SequenceDispatcher dispatcher(world, {.num_sms = 4});
        dispatcher.reserve(std::int64_t{8} << 20, stream);
        PlanHandle plan = dispatcher.plan_dispatch(test::forward_parts(room), stream);
        const Views inputs{arena.take(DType::bfloat16, {800, 64}),
                           arena.take(DType::bfloat16, {800, 32}),
                           arena.take(DType::bfloat16, {800, 32})};
        arena.synchronize();
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        cuda_ok(cudaStreamBeginCapture(arena.stream(), cudaStreamCaptureModeThreadLocal));
        (void)dispatcher.dispatch(plan, inputs, stream);
        const std::byte* const window = dispatcher.dispatch(plan, inputs, stream)[0].data;
        cuda_ok(cudaStreamEndCapture(arena.stream(), &graph));
        cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
        for (int replay = 0; replay < 9; ++replay) {
          const std::size_t i = replay / 3;
          dispatcher.replace_plan(plan, test::forward_parts(cases[i]), stream);
          for (const auto& [view, tensor] : {std::pair{inputs[0], &expected[i].q[r]},
                                             {inputs[1], &expected[i].k[r]},
                                             {inputs[2], &expected[i].v[r]}}) {
            arena.copy(const_cast<std::byte*>(view.data), tensor->bytes().data(),
                       tensor->size_bytes());
          }
          cuda_ok(cudaGraphLaunch(ready, arena.stream()), world);
          const TensorView k_out(const_cast<std::byte*>(window) + plan.window_offsets()[1],
                                 DType::bfloat16, expected[i].k_out[r].shape());
          ASSERT_TRUE(same_bytes(arena.download(k_out), expected[i].k_out[r]))
              << "replay " << replay;
        }
        dispatcher.synchronize(stream);
        world.barrier();
        cuda_ok(cudaGraphExecDestroy(ready));
        cuda_ok(cudaGraphDestroy(graph));
      },
      test::world_options());
}

}  // namespace
}  // namespace waybill
