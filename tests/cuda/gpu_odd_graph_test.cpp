// Graphs with an odd number of calls: windows, which are used in turn, come back too early, and
// an empty call goes between.

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "cuda/captured.h"
#include "cuda/gpu_expert_rounds.h"
#include "support/sequence_expected.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill {
namespace {

using test::AnsweredCase;
using test::Captured;
using test::DeviceArena;
using test::DeviceInput;
using test::Expected;
using test::same_bytes;
using test::to_size;
using Views = std::vector<ConstTensorView>;

constexpr int num_rounds = 6;

/// Some ranks are late now and then.
void delay(Random& random) {
  if (random.below(3) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random.below(9)));
}

void replace(DeviceArena& arena, const ConstTensorView& to, const HostTensor& from) {
  arena.copy(const_cast<std::byte*>(to.data), from.bytes().data(), from.size_bytes());
}

/// What one rank does with one plan, over and over, with other rows each time.
class SequenceSteps {
 public:
  SequenceSteps(World& world, const test::SequenceCase& sample, const std::vector<Expected>& rounds,
                int num_sms)
      : world_(world),
        rounds_(rounds),
        r_(to_int(world.rank())),
        arena_(world, std::int64_t{64} << 20),
        dispatcher_(world, {.num_sms = num_sms}) {
    dispatcher_.reserve(std::int64_t{1} << 22, stream());
    forward_ = dispatcher_.plan_dispatch(test::forward_parts(sample), stream());
    gradient_ = dispatcher_.plan_kv_gradient(test::kv_parts(sample), stream());
    const Expected& first = rounds[0];
    inputs_ = {arena_.upload(first.q[r_]), arena_.upload(first.k[r_]), arena_.upload(first.v[r_])};
    sums_ = {arena_.take(inputs_[1].dtype, first.k[r_].shape()),
             arena_.take(inputs_[2].dtype, first.v[r_].shape())};
    copies_ = {arena_.take(inputs_[1].dtype, first.k_out[r_].shape()),
               arena_.take(inputs_[2].dtype, first.v_out[r_].shape())};
  }

  [[nodiscard]] cudaStream_t cuda_stream() const { return arena_.stream(); }

  void dispatch() {
    const auto outputs = dispatcher_.dispatch(forward_, inputs_, stream());
    for (const int t : {0, 1}) {
      arena_.copy(copies_[t].data, outputs[t + 1].data, size_of(copies_[t]));
    }
  }

  /// Gradients are what was received; those of K are written where the call wants them.
  void gradient() {
    const auto places = dispatcher_.gradient_inputs(gradient_, stream());
    arena_.copy(places[0].data, copies_[0].data, size_of(copies_[0]));
    dispatcher_.kv_gradient(gradient_, Views{places[0], copies_[1]}, sums_, stream());
  }

  /// Runs `step`, which ends with a gradient if `sums`, on the rows of each round.
  template <class Step>
  void check(const char* name, bool sums, const Step& step) {
    Random random(r_);
    for (std::size_t i = 0; i < rounds_.size(); ++i) {
      const Expected& want = rounds_[i];
      replace(arena_, inputs_[0], want.q[r_]);
      replace(arena_, inputs_[1], want.k[r_]);
      replace(arena_, inputs_[2], want.v[r_]);
      delay(random);
      step();
      ASSERT_TRUE(same_bytes(arena_.download(copies_[0]), want.k_out[r_])) << name << i;
      ASSERT_TRUE(same_bytes(arena_.download(copies_[1]), want.v_out[r_])) << name << i;
      if (!sums) continue;
      ASSERT_TRUE(same_bytes(arena_.download(sums_[0]), want.k_gradient[r_])) << name << i;
      ASSERT_TRUE(same_bytes(arena_.download(sums_[1]), want.v_gradient[r_])) << name << i;
    }
  }

  /// Windows of another generation, with a table of their own.
  void grow() {
    world_.barrier();
    dispatcher_.reserve(2 * dispatcher_.window_bytes(), stream());
  }

  void close() {
    dispatcher_.synchronize(stream());
    world_.barrier();
    dispatcher_.close();
  }

 private:
  [[nodiscard]] Stream stream() const { return {arena_.stream()}; }
  static std::int64_t size_of(const TensorView& view) {
    return view.shape[0] * view.shape[1] * dtype_bytes(view.dtype);
  }

  World& world_;
  const std::vector<Expected>& rounds_;
  std::size_t r_;
  DeviceArena arena_;
  SequenceDispatcher dispatcher_;
  PlanHandle forward_, gradient_;
  Views inputs_;
  std::vector<TensorView> sums_, copies_;
};

void check_sequences(std::int32_t world_size) {
  const test::SequenceCase sample = test::sequence_cases(world_size, 1).back();
  std::vector<Expected> rounds;
  for (std::uint64_t i = 0; i < num_rounds; ++i) rounds.emplace_back(sample, 10 * i + 1);
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        for (const int num_sms : {4, 0}) {
          SequenceSteps steps(world, sample, rounds, num_sms);
          const Captured one(steps.cuda_stream(), [&] { steps.dispatch(); });
          const Captured three(steps.cuda_stream(), [&] {
            steps.dispatch();
            steps.dispatch();
            steps.gradient();
          });
          const Captured two(steps.cuda_stream(), [&] {
            steps.dispatch();
            steps.gradient();
          });
          steps.check("one call, ", false, [&] { one.launch(world); });
          steps.check("three calls, ", true, [&] { three.launch(world); });
          steps.check("no graph, ", true, [&] {
            steps.dispatch();
            steps.gradient();
          });
          steps.check("two calls behind one, ", true, [&] {
            one.launch(world);
            two.launch(world);
          });
          steps.close();
        }
      },
      test::world_options());
}

/// A graph goes on with the windows, and the tables of ranks, that it was captured with.
void check_growth(std::int32_t world_size) {
  const test::SequenceCase sample = test::sequence_cases(world_size, 1).back();
  std::vector<Expected> rounds;
  for (std::uint64_t i = 0; i < num_rounds; ++i) rounds.emplace_back(sample, 10 * i + 1);
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        SequenceSteps steps(world, sample, rounds, 4);
        const auto calls = [&] {
          steps.dispatch();
          steps.gradient();
        };
        const Captured before(steps.cuda_stream(), calls);
        steps.check("before it, ", true, [&] { before.launch(world); });
        steps.grow();
        steps.check("behind it, the windows of before, ", true, [&] { before.launch(world); });
        steps.check("behind it, ", true, calls);
        const Captured behind(steps.cuda_stream(), calls);
        steps.check("both in turn, ", true, [&] {
          before.launch(world);
          behind.launch(world);
        });
        steps.close();
      },
      test::world_options());
}

TEST(GpuOddGraph, behind_a_growth_of_two_ranks) { check_growth(2); }
TEST(GpuOddGraph, behind_a_growth_of_four_ranks) { check_growth(4); }

TEST(GpuOddGraph, two_ranks) { check_sequences(2); }
TEST(GpuOddGraph, four_ranks) { check_sequences(4); }

std::vector<AnsweredCase> expert_rounds(const EPConfig& config) {
  Random random(71);
  std::vector<AnsweredCase> rounds;
  for (int i = 0; i < num_rounds; ++i) {
    rounds.push_back(
        test::answered(test::random_case(config, random, {.tokens = config.max_tokens})));
  }
  return rounds;
}

void check_experts(std::int32_t world_size) {
  EPConfig config;
  config.max_tokens = 48;
  config.hidden = 256;
  config.topk = 4;
  config.num_experts = 16;
  config.world_size = config.local_world_size = world_size;
  const auto rounds = expert_rounds(config);
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        EPConfig own = config;
        own.rank = to_int(world.rank());
        const std::size_t r = own.rank;
        DeviceArena arena(world, std::int64_t{64} << 20);
        const Stream stream{arena.stream()};
        EPAll2AllLayer layer(world, own, {.num_sms = 4, .fixed_rows = most_recv_rows(config, {})});
        const DeviceInput device(arena, rounds[0].sample, own.rank);
        const TensorView sums = arena.take(config.token_dtype, {config.max_tokens, config.hidden});
        const auto step = [&](bool in_place) {
          const EPDispatched got = layer.dispatch(device.input, stream);
          ConstTensorView rows = got.rows;
          if (in_place) {
            const TensorView place = layer.combine_input(rows.shape[0], stream);
            arena.copy(place.data, rows.data, rows.shape[0] * config.hidden * 2);
            rows = place;
          }
          layer.combine({rows, {}, {}, sums}, *got.layout, stream);
        };
        const auto check = [&](const char* name, const auto& run) {
          Random random(r);
          for (std::size_t i = 0; i < rounds.size(); ++i) {
            replace(arena, device.input.tokens, rounds[i].sample.tokens[r]);
            replace(arena, device.input.ids, rounds[i].sample.ids[r]);
            replace(arena, device.input.weights, rounds[i].sample.weights[r]);
            delay(random);
            run();
            ASSERT_TRUE(same_bytes(arena.download(sums), rounds[i].sums[r])) << name << i;
            layer.check_overflow();
          }
        };
        step(false);
        arena.synchronize();
        world.barrier();
        const Captured one(arena.stream(), [&] { step(true); });
        const Captured two(arena.stream(), [&] {
          step(false);
          step(true);
        });
        check("one step, ", [&] { one.launch(world); });
        check("two steps, ", [&] { two.launch(world); });
        check("no graph, ", [&] { step(true); });
        check("one, two and none, ", [&] {
          one.launch(world);
          two.launch(world);
          step(false);
        });
        world.barrier();
        layer.finalize();
      },
      test::options_of(config));
}

TEST(GpuOddGraph, experts_of_two_ranks) { check_experts(2); }
TEST(GpuOddGraph, experts_of_four_ranks) { check_experts(4); }

}  // namespace
}  // namespace waybill
