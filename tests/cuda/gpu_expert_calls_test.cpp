// How calls of a layer of experts follow each other on GPUs.

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/gpu_expert_rounds.h"
#include "experts/expert_memory.h"

namespace waybill {
namespace {

using test::AnsweredCase;
using test::DeviceArena;
using test::DeviceInput;
using test::ExpertCase;
using test::ExpertRig;
using test::same_bytes;
using test::small_config;
using test::to_size;

constexpr std::int64_t arena_bytes = std::int64_t{64} << 20;

/// The same experts again, other tokens and weights.
void dispatch_with_earlier_tables(const EPConfig& config) {
  for (const EPRows form : {EPRows::grouped, EPRows::compact}) {
    EPDispatchOptions options;
    options.rows = form;
    Random random(31);
    std::vector<ExpertCase> cases{test::random_case(config, random, {.edges = false})};
    for (int i = 0; i < 5; ++i) {
      ExpertCase next = cases[0];
      for (auto* tensors : {&next.tokens, &next.weights}) {
        for (HostTensor& tensor : *tensors) {
          for (std::int64_t e = 0; e < tensor.size_bytes() / dtype_bytes(tensor.dtype()); ++e) {
            test::set_float(tensor, e, random.uniform_float());
          }
        }
      }
      cases.push_back(std::move(next));
    }
    std::vector<ExpertDispatch> expected;
    for (const ExpertCase& sample : cases) expected.push_back(sample.dispatch(options));
    run_gpu_thread_world(
        config.world_size,
        [&](World& world) {
          DeviceArena arena(world, arena_bytes);
          ExpertRig rig(world, config, options, most_recv_rows(config, options), 4);
          std::shared_ptr<const ExpertTables> tables;
          for (std::size_t i = 0; i < cases.size(); ++i) {
            const DeviceInput device(arena, cases[i], rig.config().rank);
            rig.use_sms(static_cast<int>(1 + i));
            tables = rig.dispatch(device.input, {arena.stream()}, tables.get());
            test::expect_rows(rig, arena, expected[i]);
            test::expect_tables(arena, tables->views(), expected[i], rig.config().rank);
          }
          world.barrier();
        },
        test::options_of(config));
  }
}

TEST(GpuExpertCalls, a_dispatch_with_earlier_tables) {
  dispatch_with_earlier_tables(small_config(2));
}
TEST(GpuExpertCalls, a_dispatch_with_earlier_tables_on_nodes) {
  dispatch_with_earlier_tables(small_config(4, 2));
}

std::vector<AnsweredCase> random_steps(const EPConfig& config, int count, Random& random) {
  std::vector<AnsweredCase> steps;
  for (int i = 0; i < count; ++i) {
    steps.push_back(test::answered(test::random_case(config, random)));
  }
  return steps;
}

/// Two dispatches, then their combines, over and over, without a host wait and with late ranks.
void follow_each_other(const EPConfig& config) {
  Random random(32);
  const auto steps = random_steps(config, 40, random);
  run_gpu_thread_world(
      config.world_size,
      [&](World& world) {
        DeviceArena arena(world, std::int64_t{256} << 20);
        const Stream stream{arena.stream()};
        const std::size_t r = to_int(world.rank());
        ExpertRig rig(world, config, {}, most_recv_rows(config, {}), 4);
        Random delays(r);
        std::vector<TensorView> sums;
        std::vector<DeviceInput> inputs;
        for (const AnsweredCase& step : steps) {
          inputs.emplace_back(arena, step.sample, rig.config().rank);
        }
        world.barrier();
        for (std::size_t i = 0; i < steps.size(); i += 2) {
          std::vector<std::shared_ptr<const ExpertTables>> tables;
          std::vector<TensorView> rows;
          for (std::size_t k = i; k < i + 2; ++k) {
            if (delays.below(4) == 0) {
              std::this_thread::sleep_for(std::chrono::milliseconds(delays.below(20)));
            }
            tables.push_back(rig.dispatch(inputs[k].input, stream));
            const auto& expected = steps[k].dispatch.recv_tokens[r];
            rows.push_back(arena.take(expected.dtype(), expected.shape()));
            arena.copy(rows.back().data, rig.window(), expected.size_bytes());
          }
          for (std::size_t k = 0; k < 2; ++k) {
            const auto& expected = steps[i + k].sums[r];
            sums.push_back(arena.take(expected.dtype(), expected.shape()));
            rig.combine({rows[k], {}, {}, sums.back()}, *tables[k], stream);
          }
        }
        for (std::size_t i = 0; i < steps.size(); ++i) {
          ASSERT_TRUE(same_bytes(arena.download(sums[i]), steps[i].sums[r])) << "step " << i;
          ASSERT_TRUE(arena.guards_hold(sums[i])) << "step " << i;
        }
        world.barrier();
      },
      test::options_of(config));
}

TEST(GpuExpertCalls, calls_follow_each_other_without_barriers_and_with_late_ranks) {
  follow_each_other(small_config(4));
}
TEST(GpuExpertCalls, calls_follow_each_other_without_barriers_and_with_late_ranks_on_nodes) {
  follow_each_other(small_config(4, 2));
}

/// More rows than the windows hold: told to the host, nothing behind the windows is written, and
/// the next call is right.
void count_rows_past_the_capacity(const EPConfig& config, EPRows form = EPRows::grouped) {
  EPDispatchOptions options;
  options.rows = form;
  Random random(34);
  const ExpertCase large = test::random_case(
      config, random, {.draw = test::Draw::one_expert, .drop = 0, .tokens = config.max_tokens});
  const ExpertCase small = test::random_case(config, random, {.drop = 0, .tokens = 5});
  const ExpertDispatch too_many = large.dispatch(options);
  const ExpertDispatch fits = small.dispatch(options);
  constexpr std::int64_t capacity = 41;
  run_gpu_thread_world(
      config.world_size,
      [&](World& world) {
        DeviceArena arena(world, arena_bytes);
        const Stream stream{arena.stream()};
        ExpertRig rig(world, config, options, capacity, 4);
        const DeviceInput first(arena, large, rig.config().rank);
        const DeviceInput second(arena, small, rig.config().rank);
        // Dispatch windows are larger than their rows: what lies between the parts must stay.
        const std::int64_t bytes = rig.memory().window.total;
        std::vector<std::byte> marks(bytes, std::byte{0x77});
        arena.copy(rig.memory().dispatch_windows[0].local, marks.data(), bytes);
        arena.synchronize();
        world.barrier();
        (void)rig.dispatch(first.input, stream);
        std::vector<std::byte> after(bytes);
        arena.read(after.data(), rig.window(), bytes);
        const ExpertOverflow over = rig.executor().take_overflow();
        EXPECT_EQ(over.rows, too_many.rows.largest_recv_rows);  // on all ranks
        EXPECT_EQ(over.call, 1);
        EXPECT_EQ(rig.executor().take_overflow().rows, 0);
        const ExpertWindowLayout& window = rig.memory().window;
        for (const auto& [end, next] :
             {std::pair{window.rows + capacity * config.hidden * 2, window.tags},
              std::pair{window.tags + capacity * 16, window.scales},
              std::pair{window.weights + capacity * 4 * window.weights_per_row, window.topk}}) {
          for (std::int64_t i = end; i < next; ++i) {
            ASSERT_EQ(after[i], std::byte{0x77}) << "byte " << i;
          }
        }
        const auto tables = rig.dispatch(second.input, stream);
        test::expect_rows(rig, arena, fits);
        test::expect_tables(arena, tables->views(), fits, rig.config().rank);
        EXPECT_EQ(rig.executor().take_overflow().rows, 0);
        world.barrier();
      },
      test::options_of(config));
}

TEST(GpuExpertCalls, rows_past_the_capacity_are_counted_and_not_written) {
  count_rows_past_the_capacity(small_config(2));
}
/// Without receive slots.
TEST(GpuExpertCalls, rows_past_the_capacity_of_many_tokens_are_counted_and_not_written) {
  count_rows_past_the_capacity(test::config_of(2, 16, 4, 150, 256));
  count_rows_past_the_capacity(test::config_of(2, 16, 1, 150, 256));  // a row per token
  // Placement drops the first rows of tokens that do not fit; compact rows only the sender drops.
  count_rows_past_the_capacity(test::config_of(2, 16, 4, 150, 256), EPRows::compact);
}
TEST(GpuExpertCalls, rows_past_the_capacity_are_counted_and_not_written_on_nodes) {
  count_rows_past_the_capacity(small_config(4, 2));
}

/// More rows than the windows hold, but the caller waits for the counts: larger windows come
/// between counting and rows.
void grow_between_counts_and_rows(const EPConfig& config) {
  for (const EPRows form : {EPRows::grouped, EPRows::compact}) {
    EPDispatchOptions options;
    options.rows = form;
    Random random(37);
    std::vector<ExpertCase> cases;
    std::vector<ExpertDispatch> expected;
    for (const std::int64_t tokens : {5, 60, 20}) {
      cases.push_back(test::random_case(config, random, {.drop = 0, .tokens = tokens}));
      expected.push_back(cases.back().dispatch(options));
    }
    run_gpu_thread_world(
        config.world_size,
        [&](World& world) {
          DeviceArena arena(world, arena_bytes);
          ExpertRig rig(world, config, options, 48, 4);
          for (std::size_t i = 0; i < cases.size(); ++i) {
            const DeviceInput device(arena, cases[i], rig.config().rank);
            const auto tables = rig.dispatch_growing(device.input, {arena.stream()});
            test::expect_rows(rig, arena, expected[i]);
            test::expect_tables(arena, tables->views(), expected[i], rig.config().rank);
            EXPECT_EQ(rig.executor().take_overflow().rows, 0);
            EXPECT_EQ(rig.memory().capacity_rows > 48, i > 0);
          }
          world.barrier();
        },
        test::options_of(config));
  }
}

TEST(GpuExpertCalls, windows_grow_between_counts_and_rows) {
  grow_between_counts_and_rows(small_config(2));
}
TEST(GpuExpertCalls, windows_grow_between_counts_and_rows_on_nodes) {
  grow_between_counts_and_rows(small_config(4, 2));
}

}  // namespace
}  // namespace waybill
