// EPAll2AllLayer on GPUs, against the simulation.

#include <gtest/gtest.h>

#include "cuda/expert_rig.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill {
namespace {

using test::DeviceArena;
using test::DeviceInput;
using test::Draw;
using test::ExpertCase;
using test::same_bytes;
using test::to_size;

constexpr std::int64_t arena_bytes = std::int64_t{128} << 20;

/// @param ranks_per_node 0: one node
EPConfig config_of(std::int32_t world_size, DType dtype = DType::bfloat16,
                   std::int32_t ranks_per_node = 0) {
  EPConfig config;
  config.max_tokens = 48;
  config.hidden = 256;
  config.topk = 4;
  config.num_experts = 16;
  config.world_size = world_size;
  config.local_world_size = ranks_per_node == 0 ? world_size : ranks_per_node;
  config.token_dtype = dtype;
  return config;
}

/// A dispatch, what experts make of it, and the sums of that.
struct Step {
  ExpertCase sample;
  ExpertDispatch dispatch;
  std::vector<HostTensor> outputs;
  std::vector<HostTensor> sums;
};

Step make_step(ExpertCase sample, const EPLayerOptions& options, Random& random) {
  Step step{std::move(sample), {}, {}, {}};
  step.dispatch = step.sample.dispatch(options.dispatch);
  step.outputs = test::random_outputs(step.dispatch, random);
  step.sums = simulate_expert_combine(step.dispatch, test::views_of(step.outputs),
                                      {.local_combine = options.enable_local_combine});
  return step;
}

void expect_dispatched(const DeviceArena& arena, const EPDispatched& got,
                       const ExpertDispatch& expected, std::size_t rank) {
  EXPECT_TRUE(same_bytes(arena.download(got.rows), expected.recv_tokens[rank])) << "rows";
  EXPECT_TRUE(same_bytes(arena.download(got.weights), expected.recv_weights[rank])) << "weights";
  EXPECT_EQ(got.layout->num_recv_rows(), expected.recv_tokens[rank].shape()[0]);
}

/// Combines, with the experts' outputs copied by the layer or written where it wants them.
void expect_sums(EPAll2AllLayer& layer, DeviceArena& arena, const EPLayout& layout,
                 const Step& step, bool in_place) {
  const std::size_t rank = layer.config().rank;
  const HostTensor& outputs = step.outputs[rank];
  ExpertCombineInput input;
  if (in_place) {
    const TensorView window = layer.combine_input(outputs.shape()[0], {arena.stream()});
    arena.copy(window.data, outputs.bytes().data(), outputs.size_bytes());
    arena.synchronize();
    input.rows = window;
  } else {
    input.rows = arena.upload(outputs);
  }
  input.output = arena.take(step.sums[rank].dtype(), step.sums[rank].shape());
  layer.combine(input, layout, {arena.stream()});
  EXPECT_TRUE(same_bytes(arena.download(input.output), step.sums[rank])) << "sums";
  EXPECT_TRUE(arena.guards_hold(input.output));
}

/// Random rounds; in the third all tokens go to one expert, and the windows grow.
void check_layer(const EPConfig& config, const EPLayerOptions& options, std::uint64_t number) {
  Random random(number);
  std::vector<Step> steps;
  for (int i = 0; i < 12; ++i) {
    test::RandomCaseOptions how;
    if (i == 2) how = {.draw = Draw::one_expert, .drop = 0, .tokens = config.max_tokens};
    if (i == 4) how.tokens = 0;
    steps.push_back(make_step(test::random_case(config, random, how), options, random));
  }
  run_gpu_thread_world(
      config.world_size,
      [&](World& world) {
        DeviceArena arena(world, arena_bytes);
        EPConfig own = config;
        own.rank = to_int(world.rank());
        EPAll2AllLayer layer(world, own, options);
        const std::int64_t first_rows = layer.output_rows();
        for (std::size_t i = 0; i < steps.size(); ++i) {
          SCOPED_TRACE(concat("step ", i, ", rank ", own.rank));
          arena.reset();
          const DeviceInput device(arena, steps[i].sample, own.rank);
          const EPDispatched got = layer.dispatch(device.input, {arena.stream()});
          expect_dispatched(arena, got, steps[i].dispatch, own.rank);
          expect_sums(layer, arena, *got.layout, steps[i], i % 2 == 1);
          const EPDispatched again = layer.dispatch(device.input, *got.layout, {arena.stream()});
          expect_dispatched(arena, again, steps[i].dispatch, own.rank);
          expect_sums(layer, arena, *again.layout, steps[i], i % 2 == 0);
        }
        // A row per token and rank: there is room for all of them from the start.
        const bool grows = config.world_size > 1 && options.dispatch.rows == EPRows::grouped;
        EXPECT_EQ(layer.output_rows() > first_rows, grows);
        world.barrier();
        layer.finalize();
      },
      test::options_of(config));
}

TEST(GpuEpLayer, one_rank) { check_layer(config_of(1), {.num_sms = 4, .capacity_factor = 1}, 51); }
TEST(GpuEpLayer, two_ranks_grow) {
  check_layer(config_of(2), {.num_sms = 4, .capacity_factor = 1}, 52);
}
TEST(GpuEpLayer, four_ranks_grow) {
  check_layer(config_of(4, DType::float16), {.num_sms = 4, .capacity_factor = 1}, 53);
}
TEST(GpuEpLayer, local_combine) {
  check_layer(config_of(2), {.num_sms = 4, .enable_local_combine = true, .capacity_factor = 1}, 54);
}
TEST(GpuEpLayer, two_nodes_grow) {
  check_layer(config_of(4, DType::bfloat16, 2), {.num_sms = 4, .capacity_factor = 1}, 57);
}
TEST(GpuEpLayer, local_combine_on_two_nodes) {
  check_layer(config_of(4, DType::float16, 2),
              {.num_sms = 4, .enable_local_combine = true, .capacity_factor = 1}, 58);
}
TEST(GpuEpLayer, compact_rows) {
  EPLayerOptions options{.num_sms = 4};
  options.dispatch.rows = EPRows::compact;
  const EPConfig config = config_of(2);
  Random random(55);
  std::vector<Step> steps;
  for (int i = 0; i < 6; ++i) {
    steps.push_back(make_step(test::random_case(config, random), options, random));
  }
  run_gpu_thread_world(
      2,
      [&](World& world) {
        DeviceArena arena(world, arena_bytes);
        EPConfig own = config;
        own.rank = to_int(world.rank());
        EPAll2AllLayer layer(world, own, options);
        for (const Step& step : steps) {
          arena.reset();
          const DeviceInput device(arena, step.sample, own.rank);
          const EPDispatched got = layer.dispatch(device.input, {arena.stream()});
          expect_dispatched(arena, got, step.dispatch, own.rank);
          expect_sums(layer, arena, *got.layout, step, true);
        }
        world.barrier();
        layer.finalize();
      },
      test::world_options());
}

}  // namespace
}  // namespace waybill
