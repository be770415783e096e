// Layouts on GPUs that outlive other dispatches by their routing, and the tables' memory.

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "cuda/captured.h"
#include "cuda/experts/tables.h"
#include "cuda/gpu_expert_rounds.h"
#include "support/sequence_expected.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill {
namespace {

using test::Captured;
using test::DeviceArena;
using test::DeviceInput;
using test::ExpertCase;
using test::same_bytes;
using test::small_config;
using test::to_size;

constexpr std::int64_t arena_bytes = std::int64_t{128} << 20;

/// A dispatch, what experts make of it, and the sums of that: weighted where it has weights.
struct Step {
  ExpertCase sample;
  ExpertDispatch dispatch;
  std::vector<HostTensor> outputs;
  EPCombineOptions options;
  std::vector<HostTensor> sums;
};

Step make_step(ExpertCase sample, const EPLayerOptions& options, Random& random) {
  Step step{std::move(sample), {}, {}, {.local_combine = options.enable_local_combine}, {}};
  step.dispatch = step.sample.dispatch(options.dispatch);
  step.outputs = test::random_outputs(step.dispatch, random);
  step.options.weighted = !step.sample.weights.empty() && options.dispatch.rows == EPRows::grouped;
  step.sums = simulate_expert_combine(step.dispatch, test::views_of(step.outputs), step.options);
  return step;
}

/// The same ids with other tokens, and other weights or none.
std::vector<Step> steps_of_one_routing(const EPConfig& config, const EPLayerOptions& options) {
  Random random(81);
  const ExpertCase first = test::random_case(config, random, {.edges = false});
  std::vector<Step> steps;
  for (const bool weights : {true, false, true, true, false}) {
    ExpertCase one = first;
    for (auto* tensors : {&one.tokens, &one.weights}) {
      for (HostTensor& tensor : *tensors) {
        for (std::int64_t e = 0; e < tensor.size_bytes() / dtype_bytes(tensor.dtype()); ++e) {
          test::set_float(tensor, e, random.uniform_float());
        }
      }
    }
    if (!weights) one.weights.clear();
    steps.push_back(make_step(std::move(one), options, random));
  }
  return steps;
}

/// One rank's layer, and what it does with the steps.
class Rank {
 public:
  Rank(World& world, EPConfig config, const EPLayerOptions& options)
      : arena_(world, arena_bytes), r_(to_int(world.rank())) {
    config.rank = to_int(world.rank());
    layer_ = std::make_unique<EPAll2AllLayer>(world, config, options);
  }

  [[nodiscard]] EPAll2AllLayer& layer() { return *layer_; }
  [[nodiscard]] DeviceArena& arena() { return arena_; }
  [[nodiscard]] Stream stream() const { return {arena_.stream()}; }

  EPDispatched dispatch(const Step& step, const EPLayout* earlier = nullptr) {
    const DeviceInput device(arena_, step.sample, layer_->config().rank);
    return earlier == nullptr ? layer_->dispatch(device.input, stream())
                              : layer_->dispatch(device.input, *earlier, stream());
  }

  void expect_sums(const Step& step, const EPLayout& layout) {
    const TensorView rows = arena_.take(step.outputs[r_].dtype(), step.outputs[r_].shape());
    arena_.copy(rows.data, step.outputs[r_].bytes().data(), step.outputs[r_].size_bytes());
    const TensorView sums = arena_.take(step.sums[r_].dtype(), step.sums[r_].shape());
    layer_->combine({rows, {.weighted = step.options.weighted}, {}, sums}, layout, stream());
    EXPECT_TRUE(same_bytes(arena_.download(sums), step.sums[r_]));
  }

  [[nodiscard]] std::size_t index() const { return r_; }

 private:
  DeviceArena arena_;
  std::size_t r_;
  std::unique_ptr<EPAll2AllLayer> layer_;
};

void check_old_layouts(const EPConfig& config, const EPLayerOptions& options) {
  const auto steps = steps_of_one_routing(config, options);
  run_gpu_thread_world(
      config.world_size,
      [&](World& world) {
        Rank rank(world, config, options);
        std::vector<EPDispatched> made;
        for (std::size_t i = 0; i < steps.size(); ++i) {
          rank.arena().reset();
          made.push_back(
              rank.dispatch(steps[i], i == 0 ? nullptr : made[i == 1 ? 0 : i - 1].layout.get()));
          for (std::size_t earlier = 0; earlier <= i; ++earlier) {
            SCOPED_TRACE(concat("layout ", earlier, " after dispatch ", i));
            const EPLayout& layout = *made[earlier].layout;
            EXPECT_EQ(layout.has_weights(), !steps[earlier].sample.weights.empty());
            rank.expect_sums(steps[earlier], layout);
            test::expect_tables(rank.arena(), layout.tables(), steps[earlier].dispatch,
                                rank.layer().config().rank);
          }
        }
        world.barrier();
        rank.layer().finalize();
      },
      test::options_of(config));
}

TEST(GpuLayouts, give_what_they_gave_after_other_dispatches) {
  check_old_layouts(small_config(2), {.num_sms = 4});
}
TEST(GpuLayouts, give_what_they_gave_after_other_dispatches_of_more_tokens) {
  EPConfig config = small_config(2);
  config.max_tokens = 300;
  check_old_layouts(config, {.num_sms = 4});
}
TEST(GpuLayouts, give_what_they_gave_after_other_dispatches_of_compact_rows) {
  EPLayerOptions options{.num_sms = 4};
  options.dispatch.rows = EPRows::compact;
  check_old_layouts(small_config(2), options);
}
/// Weighted sums are made where the rows are, with the weights that came with them.
TEST(GpuLayouts, give_what_they_gave_in_local_sums) {
  check_old_layouts(small_config(2), {.num_sms = 4, .enable_local_combine = true});
}
TEST(GpuLayouts, give_what_they_gave_in_local_sums_of_more_tokens) {
  EPConfig config = small_config(2);
  config.max_tokens = 300;
  config.token_dtype = DType::float16;
  config.weight_dtype = DType::bfloat16;
  check_old_layouts(config, {.num_sms = 4, .enable_local_combine = true});
}
TEST(GpuLayouts, give_what_they_gave_after_other_dispatches_on_nodes) {
  check_old_layouts(small_config(4, 2), {.num_sms = 4});
}

/// A graph that combines by a layout that was made outside keeps the tables of it, though nobody
/// else has them any more, and other graphs want memory of the same size.
TEST(GpuLayouts, of_a_graph_keep_their_tables) {
  const EPConfig config = small_config(2);
  const EPLayerOptions options{.num_sms = 4, .fixed_rows = most_recv_rows(config, {})};
  Random random(82);
  const Step first =
      make_step(test::random_case(config, random, {.edges = false}), options, random);
  const Step other =
      make_step(test::random_case(config, random, {.edges = false}), options, random);
  run_gpu_thread_world(
      config.world_size,
      [&](World& world) {
        Rank rank(world, config, options);
        DeviceArena& arena = rank.arena();
        const std::size_t r = rank.index();
        EPDispatched made = rank.dispatch(first);
        rank.expect_sums(first, *made.layout);
        const TensorView rows = arena.take(config.token_dtype, {options.fixed_rows, config.hidden});
        arena.copy(rows.data, first.outputs[r].bytes().data(), first.outputs[r].size_bytes());
        const TensorView sums = arena.take(config.token_dtype, first.sums[r].shape());
        const DeviceInput input(arena, other.sample, rank.layer().config().rank);
        arena.synchronize();
        world.barrier();
        const Captured sum_up(arena.stream(), [&] {
          rank.layer().combine({rows, {.weighted = true}, {}, sums}, *made.layout, rank.stream());
        });
        made = {};
        std::vector<std::unique_ptr<Captured>> others;
        for (int i = 0; i < 3; ++i) {
          others.push_back(std::make_unique<Captured>(
              arena.stream(), [&] { (void)rank.layer().dispatch(input.input, rank.stream()); }));
        }
        for (int i = 0; i < 3; ++i) {
          for (const auto& graph : others) graph->launch(world);
          (void)rank.dispatch(other);
          sum_up.launch(world);
          ASSERT_TRUE(same_bytes(arena.download(sums), first.sums[r])) << "replay " << i;
        }
        world.barrier();
        rank.layer().finalize();
      },
      test::options_of(config));
}

/// Layouts and plans die on other threads while their rank takes memory for new ones.
TEST(GpuLayouts, may_go_on_any_thread) {
  const EPConfig config = small_config(2);
  const EPLayerOptions options{.num_sms = 4, .fixed_rows = most_recv_rows(config, {})};
  Random random(83);
  const Step step = make_step(test::random_case(config, random, {.edges = false}), options, random);
  const test::SequenceCase lines = test::sequence_cases(2, 1).back();
  run_gpu_thread_world(
      2,
      [&](World& world) {
        Rank rank(world, config, options);
        DeviceArena& arena = rank.arena();
        SequenceDispatcher dispatcher(world, {.num_sms = 4});
        dispatcher.reserve(std::int64_t{1} << 22, rank.stream());
        const DeviceInput input(arena, step.sample, rank.layer().config().rank);
        for (int round = 0; round < 40; ++round) {
          std::vector<std::shared_ptr<EPLayout>> layouts;
          std::vector<PlanHandle> plans;
          for (int i = 0; i < 16; ++i) {
            layouts.push_back(rank.layer().dispatch(input.input, rank.stream()).layout);
            plans.push_back(dispatcher.plan_dispatch(test::forward_parts(lines), rank.stream()));
          }
          std::vector<std::jthread> threads;
          for (std::size_t i = 0; i < layouts.size(); ++i) {
            threads.emplace_back([layout = std::move(layouts[i]), plan = std::move(plans[i])] {});
          }
          layouts.clear();
          plans.clear();
          for (int i = 0; i < 16; ++i) {
            const auto layout = rank.layer().dispatch(input.input, rank.stream()).layout;
            const auto plan = dispatcher.plan_dispatch(test::forward_parts(lines), rank.stream());
          }
        }
        arena.reset();
        const EPDispatched got = rank.dispatch(step);
        rank.expect_sums(step, *got.layout);
        world.barrier();
        dispatcher.close();
        rank.layer().finalize();
      },
      test::options_of(config));
}

/// Work of the caller's with the tables, on a stream of its own that is late: nobody writes them
/// before it is done, though the layout is gone.
TEST(GpuLayouts, leave_their_memory_to_work_that_was_noted) {
  const EPConfig config = small_config(2);
  const EPLayerOptions options{.num_sms = 4, .fixed_rows = most_recv_rows(config, {})};
  Random random(84);
  const Step first = make_step(test::random_case(config, random, {.tokens = 50}), options, random);
  const Step other = make_step(test::random_case(config, random, {.tokens = 50}), options, random);
  run_gpu_thread_world(
      2,
      [&](World& world) {
        Rank rank(world, config, options);
        DeviceArena& arena = rank.arena();
        cudaStream_t late = nullptr;
        test::cuda_ok(cudaStreamCreateWithFlags(&late, cudaStreamNonBlocking));
        const HostTensor& ids = first.sample.ids[rank.index()];
        const TensorView copy = arena.take(ids.dtype(), ids.shape());
        const DeviceInput input(arena, other.sample, rank.layer().config().rank);
        for (int i = 0; i < 3; ++i) {
          EPDispatched got = rank.dispatch(first);
          arena.synchronize();
          const ConstTensorView table = got.layout->tables().ids;
          const auto sleep = [](void*) {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
          };
          test::cuda_ok(cudaLaunchHostFunc(late, sleep, nullptr));
          test::cuda_ok(cudaMemcpyAsync(copy.data, table.data, ids.size_bytes(),
                                        cudaMemcpyDeviceToDevice, late));
          got.layout->note_use({late});
          got = {};
          for (int k = 0; k < 3; ++k) (void)rank.layer().dispatch(input.input, rank.stream());
          test::cuda_ok(cudaStreamSynchronize(late));
          EXPECT_TRUE(same_bytes(arena.download(copy), ids)) << i;
        }
        world.barrier();
        rank.layer().finalize();
        test::cuda_ok(cudaStreamDestroy(late));
      },
      test::options_of(config));
}

/// Its memory is shared out without a GPU. Compact rows have places in the grouped order: 18 of
/// topk slots, and up to 3 of padding for each of 128 experts.
TEST(GpuTables, HaveRoomForTheGroupedOrderAndNoMore) {
  EPConfig config = small_config(2);
  config.max_tokens = 9;
  config.topk = 1;
  config.num_experts = 256;
  const EPDispatchOptions options{.rows = EPRows::compact, .expert_alignment = 4};
  EPDispatchOptions grouped = options;
  grouped.rows = EPRows::grouped;
  const std::int64_t most = most_recv_rows(config, grouped);
  ASSERT_EQ(most, 18 + 128 * 3);
  const cuda::RoutingTables tables(config, options, 0);
  const std::int64_t bytes = most * 4;
  EXPECT_EQ(tables.send_reqs.offset - tables.grouped_to_compact.offset, (bytes + 255) / 256 * 256);
}

}  // namespace
}  // namespace waybill
