// Ranks are processes. The program that runs one of these has used no CUDA before: run them one by
// one (scripts/test_gpu.sh does).

#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_processes.h"
#include "cuda/gpu_step.h"
#include "cuda/gpu_transport_step.h"
#include "support/transport_checks.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill {
namespace {

using test::Death;
using test::to_size;

World make_world(std::shared_ptr<Bootstrap> bootstrap, int device) {
  return make_gpu_process_world(std::move(bootstrap), device);
}

void check_cases(std::int32_t world_size, int num_random, std::int64_t scale) {
  const test::CasesOnGpu cases(world_size, num_random, scale);
  test::expect_no_errors(
      test::run_gpu_processes(world_size, make_world, [&](World& world) { cases.check(world); }));
}

TEST(GpuProcess, one_rank_equals_the_simulation) { check_cases(1, 4, 1); }
TEST(GpuProcess, two_ranks_equal_the_simulation) { check_cases(2, 24, 3); }
TEST(GpuProcess, four_ranks_equal_the_simulation) { check_cases(4, 8, 7); }

void check_experts(const EPConfig& config, const EPDispatchOptions& options, std::uint64_t number) {
  Random random(number);
  const auto rounds = test::random_rounds(config, options, 7, random);
  test::expect_no_errors(test::run_gpu_processes(
      config.world_size,
      [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_gpu_process_world(std::move(bootstrap), device, config.local_world_size);
      },
      [&](World& world) {
        test::run_rounds(world, config, options, rounds, {8, 2});
      }));
}

TEST(GpuProcess, experts_equal_the_simulation) {
  check_experts(test::config_of(2, 12, 4, 90, 256), {}, 141);
}
TEST(GpuProcess, experts_on_nodes_equal_the_simulation) {
  check_experts(test::on_nodes(test::config_of(2, 12, 4, 90, 256), 1), {}, 142);
  check_experts(test::on_nodes(test::config_of(4, 16, 4, 60, 512), 2),
                {.rows = EPRows::compact, .payload = EPPayload::quantized}, 143);
}

TEST(GpuProcess, few_and_many_tokens_on_nodes_equal_the_simulation) {
  check_experts(test::on_nodes(test::config_of(2, 6, 4, 70, 64), 1), {}, 125);
  check_experts(test::on_nodes(test::config_of(4, 12, 4, 198, 64), 2), {}, 126);
  check_experts(test::on_nodes(test::config_of(2, 6, 4, 198, 64), 1), {.rows = EPRows::compact},
                127);
}

/// Bytes of the device that nobody has, while no rank does anything.
std::int64_t free_bytes(World& world) {
  std::size_t free = 0;
  std::size_t all = 0;
  world.transport().barrier("memory is as it is");
  test::cuda_ok(cudaMemGetInfo(&free, &all));
  world.transport().barrier("memory was looked at");
  return static_cast<std::int64_t>(free);
}

TEST(GpuProcess, a_finalized_layer_gives_its_memory_back) {
  constexpr std::int64_t num_layers = 6;
  constexpr std::int64_t least_block = std::int64_t{2} << 20;  // that other ranks map
  const EPConfig of_one_node = test::config_of(2, 12, 4, 300, 256);
  for (const EPConfig& config : {of_one_node, test::on_nodes(of_one_node, 1)}) {
    const auto make = [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
      return make_gpu_process_world(std::move(bootstrap), device, config.local_world_size);
    };
    test::expect_no_errors(test::run_gpu_processes(2, make, [&](World& world) {
      EPConfig mine = config;
      mine.rank = to_int(world.rank());
      const auto one_layer = [&] {
        EPAll2AllLayer layer(world, mine);
        layer.finalize();
      };
      one_layer();  // loads kernels
      const std::int64_t before = free_bytes(world);
      for (std::int64_t i = 0; i < num_layers; ++i) one_layer();
      const std::int64_t lost = before - free_bytes(world);
      if (lost < num_layers * least_block) return;
      throw std::runtime_error(concat(num_layers, " layers left ", lost, " bytes behind"));
    }));
  }
}

TEST(GpuProcess, a_dispatcher_that_moved_nothing_can_be_closed) {
  for (const std::int32_t world_size : {1, 2}) {
    test::expect_no_errors(test::run_gpu_processes(world_size, make_world, [](World& world) {
      SequenceDispatcher dispatcher(world, {});
      dispatcher.close();
    }));
  }
}

TEST(GpuProcess, puts_and_signals_reach_every_peer) {
  test::expect_no_errors(test::run_gpu_processes(2, make_world, test::check_gpu_puts_and_signals));
}

TEST(GpuProcess, a_killed_rank_is_named_by_all_others) {
  // Survivors have GPUs of their own: docs/functions/world.md says why.
  const std::int32_t world_size = std::clamp(test::num_gpus_seen_by_a_child(), 2, 4);
  const auto ends =
      test::run_until_rank_1_dies(world_size, make_world, Death::before_the_third_call);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  for (std::int32_t r = 0; r < world_size; ++r) {
    if (r == 1) continue;
    EXPECT_TRUE(test::names_timeout(
        ends[r].text, {.operation = "dispatch", .rank = r, .peer = 1, .wanted = 3, .seen = 2}, 2,
        10));
  }
}

TEST(GpuProcess, survivors_that_share_a_gpu_name_a_killed_rank) {
  const auto on_one_gpu = [](std::shared_ptr<Bootstrap> bootstrap, int /*device*/) {
    return make_gpu_process_world(std::move(bootstrap), 0);
  };
  const auto ends = test::run_until_rank_1_dies(3, on_one_gpu, Death::before_the_third_call, 5);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  for (const std::int32_t r : {0, 2}) {
    EXPECT_TRUE(test::names_timeout(
        ends[r].text, {.operation = "dispatch", .rank = r, .peer = 1, .wanted = 3, .seen = 2}, 5,
        15));
  }
}

TEST(GpuProcess, a_rank_killed_at_any_time_ends_the_calls_of_all_others) {
  const auto ends = test::run_until_rank_1_dies(2, make_world, Death::during_some_call);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  EXPECT_NE(ends[0].text.find("dispatch: rank 0 waited 2"), std::string::npos) << ends[0].text;
  EXPECT_NE(ends[0].text.find("from rank 1"), std::string::npos) << ends[0].text;
}

TEST(GpuProcess, ranks_in_one_process_are_refused_by_all) {
  const auto ends = test::run_processes(1, [](std::int32_t) {
    run_ranks_as_threads(
        2, [](std::shared_ptr<Bootstrap> bootstrap) { (void)make_world(std::move(bootstrap), 0); });
  });
  EXPECT_NE(ends[0].text.find("make_gpu_process_world: ranks 0 and 1 are both in process"),
            std::string::npos)
      << ends[0].text;
}

}  // namespace
}  // namespace waybill
