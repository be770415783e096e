// Experts between simulated hosts that NCCL connects over TCP. Ranks are processes; nodes share the
// GPUs, and their kernels take turns: deadlines are long.

#include <gtest/gtest.h>

#include "cuda/copy_store_rank.h"
#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_processes.h"
#include "cuda/simulated_hosts.h"
#include "support/with_hooks.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill {
namespace {

using test::config_of;
using test::on_nodes;
using test::SimulatedHosts;
using test::spare_options;

constexpr double long_timeout_s = 40;

/// Rounds with packed rows and with whole slices, in turn.
void check(const EPConfig& config, const EPDispatchOptions& options, std::uint64_t number) {
  Random random(number);
  const auto rounds = test::random_rounds(config, options, 8, random);
  test::expect_no_errors(test::run_gpu_processes(
      config.world_size, SimulatedHosts{config.local_world_size},
      [&](World& world) {
        test::run_rounds(world, config, options, rounds, {8, 2}, true);
      },
      long_timeout_s));
}

TEST(NcclExperts, two_nodes_of_one_equal_the_simulation) {
  check(on_nodes(config_of(2, 12, 4, 90, 256), 1), {}, 151);
}
TEST(NcclExperts, two_nodes_of_two_equal_the_simulation) {
  check(on_nodes(config_of(4, 16, 4, 60, 512), 2), {}, 152);
}
TEST(NcclExperts, three_nodes_of_one_equal_the_simulation) {
  check(on_nodes(config_of(3, 12, 4, 60, 256), 1), {.rows = EPRows::compact}, 153);
}
TEST(NcclExperts, rows_of_14_kib_equal_the_simulation) {
  check(on_nodes(config_of(2, 64, 8, 130, 7168), 1), {}, 154);
}
TEST(NcclExperts, quantized_rows_equal_the_simulation) {
  check(on_nodes(config_of(2, 12, 4, 60, 512), 1),
        {.rows = EPRows::compact, .payload = EPPayload::quantized}, 155);
}

// Copies of experts: ids cross first, and rows when slots are planned.

TEST(NcclExperts, copies_on_two_nodes_of_one_equal_the_simulation) {
  check(on_nodes(config_of(2, 12, 4, 90, 256), 1), spare_options(1), 158);
}
TEST(NcclExperts, copies_on_two_nodes_of_two_equal_the_simulation) {
  check(on_nodes(config_of(4, 16, 4, 140, 512), 2), spare_options(2), 159);
}
TEST(NcclExperts, copies_of_compact_rows_equal_the_simulation) {
  EPDispatchOptions options = spare_options(2);
  options.rows = EPRows::compact;
  options.limit = 1.05;
  check(on_nodes(config_of(3, 12, 4, 60, 256), 1), options, 160);
  options.payload = EPPayload::quantized;
  check(on_nodes(config_of(2, 12, 4, 60, 512), 1), options, 161);
}
TEST(NcclExperts, copies_that_are_there_are_used_again) {
  const EPConfig config = on_nodes(config_of(4, 24, 4, 140, 64), 2);
  const auto rounds = test::copy_rounds(config, spare_options(2), 162);
  test::expect_no_errors(test::run_gpu_processes(
      config.world_size, SimulatedHosts{2},
      [&](World& world) { test::run_copy_rounds(world, config, spare_options(2), rounds); },
      long_timeout_s));
}

/// Weights and gradients of copies. @param hooks for a stage that several rounds need
void check_store(std::int32_t ranks, std::int32_t ranks_per_node, const char* hooks) {
  const test::WithHooks with(hooks);
  const auto cases = test::network_copies(ranks);
  test::expect_no_errors(test::run_gpu_processes(
      ranks, SimulatedHosts{ranks_per_node}, [&](World& world) { test::run_copies(world, cases); },
      long_timeout_s));
}

TEST(NcclExperts, weights_and_gradients_of_copies_on_two_nodes_of_one) { check_store(2, 1, ""); }
TEST(NcclExperts, weights_and_gradients_of_copies_on_two_nodes_of_two) {
  check_store(4, 2, "copy_stage_kb=512");
}
TEST(NcclExperts, weights_and_gradients_of_copies_on_three_nodes_of_one) {
  check_store(3, 1, "copy_stage_kb=256");
}

TEST(NcclExperts, copies_are_refused_in_a_graph_and_move_after_it) {
  const test::StoreCase one(2, 2, 2, 1, 50, DType::float32);
  test::expect_no_errors(test::run_gpu_processes(
      2, SimulatedHosts{1},
      [&](World& world) {
        test::StoreRank rank(world, 2);
        rank.begin(one);
        const auto stream = rank.arena().stream();
        test::cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        EXPECT_THROW(rank.fetch(true, 0), Unsupported);
        EXPECT_THROW(rank.add(), Unsupported);
        cudaGraph_t graph = nullptr;
        test::cuda_ok(cudaStreamEndCapture(stream, &graph));
        test::cuda_ok(cudaGraphDestroy(graph));
        rank.expect_moves();
        rank.store().finalize();
      },
      long_timeout_s));
}

/// Other calls of a store move other sizes, for which NCCL would wait for ever.
TEST(NcclExperts, ranks_that_move_other_copies_are_told) {
  const test::StoreCase one(2, 2, 2, 1, 50, DType::float32);
  const auto ends = test::run_gpu_processes(
      2, SimulatedHosts{1},
      [&](World& world) {
        test::StoreRank rank(world, 2);
        rank.begin(one);
        world.rank() == Rank{0} ? rank.fetch(true, 0) : rank.add();
        rank.arena().synchronize();
      },
      20);
  for (const auto& end : ends) {
    EXPECT_EQ(end.signal, 0);
    EXPECT_NE(end.text.find("ranks disagree in call"), std::string::npos) << end.text;
  }
}

/// By a routing that is there, from few tokens in large slices, some ranks with none.
TEST(NcclExperts, known_routings_of_few_tokens_equal_the_simulation) {
  const EPConfig config = on_nodes(config_of(3, 12, 2, 700, 512), 1);
  Random random(156);
  test::RandomCaseOptions how;
  how.tokens = 9;
  std::vector<test::Round> rounds;
  for (const std::int64_t tokens : {9, 0, 700}) {
    how.tokens = tokens;
    rounds.push_back(test::make_round(concat(tokens, " tokens"),
                                      test::random_case(config, random, how), {}, random));
  }
  test::expect_no_errors(test::run_gpu_processes(
      config.world_size, SimulatedHosts{1},
      [&](World& world) {
        test::DeviceArena arena(world, test::round_arena_bytes);
        test::ExpertRig rig(world, config, {}, most_recv_rows(config, {}), 8);
        const std::size_t rank = to_int(world.rank());
        for (const bool known : {true, false}) {
          for (const test::Round& round : rounds) {
            SCOPED_TRACE(concat(round.name, known ? ", packed" : ", whole"));
            rig.know_counts(known);
            arena.reset();
            const Stream stream{arena.stream()};
            const test::DeviceInput device(arena, round.sample, to_int(world.rank()));
            const auto first = rig.dispatch(device.input, stream);
            for (int again = 0; again < 2; ++again) {
              const auto tables = rig.dispatch(device.input, stream, first.get());
              test::expect_rows(rig, arena, round.expected);
              test::expect_combine(rig, arena, *tables, round.combines.front(), round.outputs[rank],
                                   again == 1);
            }
          }
        }
        world.barrier();
      },
      long_timeout_s));
}

/// Other sizes at both ends, for which NCCL would wait for ever: told ahead of them.
TEST(NcclExperts, layouts_of_other_sizes_are_a_disagreement) {
  EPConfig config = on_nodes(config_of(2, 8, 2, 400, 256), 1);
  Random random(157);
  const auto one = test::random_case(config, random, {.drop = 0, .tokens = 5});
  const auto other = test::random_case(config, random, {.drop = 0, .tokens = 5});
  const auto ends = test::run_gpu_processes(
      2, SimulatedHosts{1},
      [&](World& world) {
        test::DeviceArena arena(world);
        const Stream stream{arena.stream()};
        config.rank = to_int(world.rank());
        EPAll2AllLayer layer(world, config, EPLayerOptions{.num_sms = 4});
        const EPDispatched first =
            layer.dispatch(test::DeviceInput(arena, one, config.rank).input, stream);
        const EPDispatched second =
            layer.dispatch(test::DeviceInput(arena, other, config.rank).input, stream);
        const EPLayout& layout = config.rank == 0 ? *first.layout : *second.layout;
        const auto rows = arena.take(config.token_dtype, {layout.num_recv_rows(), config.hidden});
        const auto sums = arena.take(config.token_dtype, {5, config.hidden});
        layer.combine({.rows = rows, .options = {}, .biases = {}, .output = sums}, layout, stream);
        (void)arena.download(sums);
      },
      20);
  for (std::size_t r = 0; r < ends.size(); ++r) {
    SCOPED_TRACE(concat("rank ", r, ": ", ends[r].text));
    EXPECT_EQ(ends[r].signal, 0);
    EXPECT_NE(ends[r].text.find("ranks disagree in call 3"), std::string::npos);
  }
}

}  // namespace
}  // namespace waybill
