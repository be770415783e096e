// Ranks are processes; run them one by one (scripts/test_gpu.sh does). Where there are more ranks
// than GPUs they share them, which NVSHMEM allows, a slice of time each.

#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/copy_store_rank.h"
#include "cuda/gpu_disagreements.h"
#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_nodes.h"
#include "cuda/gpu_processes.h"
#include "cuda/gpu_transport_step.h"
#include "support/transport_checks.h"
#include "support/with_hooks.h"
#include "transport/transport.h"

namespace waybill {
namespace {

using test::Death;
using test::ProcessEnd;
using test::to_size;

World make_world(std::shared_ptr<Bootstrap> bootstrap, int device) {
  return make_nvshmem_world(std::move(bootstrap), device);
}

/// One a GPU, 4 at most.
std::int32_t num_ranks() { return std::clamp(test::num_gpus_seen_by_a_child(), 1, 4); }

TEST(NvshmemWorld, ranks_equal_the_simulation) {
  const test::CasesOnGpu cases(num_ranks(), 16, 3);
  test::expect_no_errors(
      test::run_gpu_processes(num_ranks(), make_world, [&](World& world) { cases.check(world); }));
}

TEST(NvshmemWorld, puts_and_signals_reach_every_peer) {
  test::expect_no_errors(
      test::run_gpu_processes(num_ranks(), make_world, test::check_gpu_puts_and_signals));
}

TEST(NvshmemWorld, puts_and_signals_go_between_nodes_without_pointers) {
  const auto one_rank_a_node = [](std::shared_ptr<Bootstrap> bootstrap, int device) {
    return make_nvshmem_world(std::move(bootstrap), device, 1);
  };
  test::expect_no_errors(test::run_gpu_processes(num_ranks(), one_rank_a_node, [](World& world) {
    SymmetricBuffer buffer = world.transport().allocate(8, "test");
    for (std::int32_t r = 0; r < world.world_size(); ++r) {
      EXPECT_EQ(buffer.peers[r] == nullptr, Rank{r} != world.rank());
    }
    world.transport().release(buffer);
    test::check_gpu_puts_and_signals(world);
  }));
}

/// What a world says whose transport shows signals before rows.
std::vector<ProcessEnd> ends_where_nvshmem_enforces(std::int32_t ranks_per_node) {
  const test::WithHooks enforces("nvshmem_enforces=1");
  return test::run_gpu_processes(
      2,
      [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_nvshmem_world(std::move(bootstrap), device, ranks_per_node);
      },
      [](World& world) { world.barrier(); });
}

TEST(NvshmemWorld, a_transport_that_shows_signals_before_rows_is_refused_between_nodes) {
  for (const ProcessEnd& end : ends_where_nvshmem_enforces(1)) {
    EXPECT_NE(end.text.find("enforces consistency at the target"), std::string::npos) << end.text;
    EXPECT_NE(end.text.find("GDRCopy"), std::string::npos) << end.text;
  }
}
TEST(NvshmemWorld, inside_a_node_it_does_not_matter) {
  test::expect_no_errors(ends_where_nvshmem_enforces(2));
}

TEST(NvshmemWorld, a_silent_rank_of_another_node_is_named) {
  if (num_ranks() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const auto one_rank_a_node = [](std::shared_ptr<Bootstrap> bootstrap, int device) {
    return make_nvshmem_world(std::move(bootstrap), device, 1);
  };
  const auto ends = test::run_gpu_processes(
      2, one_rank_a_node,
      [](World& world) {
        const SignalPad pad = world.transport().allocate_signals(1, "test");
        if (world.rank() == Rank{1}) std::this_thread::sleep_for(std::chrono::seconds(5));
        if (world.rank() == Rank{0}) (void)world.transport().wait({&pad, 0}, 7, Rank{1}, "unload");
      },
      2);
  EXPECT_TRUE(test::names_timeout(
      ends[0].text, {.operation = "wait", .rank = 0, .peer = 1, .wanted = 7, .seen = 0}, 2, 10));
  EXPECT_EQ(ends[1].text, "");
}

TEST(NvshmemWorld, a_killed_rank_is_named_by_all_others) {
  if (num_ranks() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const auto ends =
      test::run_until_rank_1_dies(num_ranks(), make_world, Death::before_the_third_call);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  for (std::int32_t r = 0; r < num_ranks(); ++r) {
    if (r == 1) continue;
    EXPECT_TRUE(test::names_timeout(
        ends[r].text, {.operation = "dispatch", .rank = r, .peer = 1, .wanted = 3, .seen = 2}, 2,
        10));
  }
}

void check_nodes(const Topology& topology) {
  const auto cases = test::node_cases(topology, 16, 3);
  test::expect_no_errors(test::run_gpu_processes(
      topology.world_size,
      [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_nvshmem_world(std::move(bootstrap), device, topology.ranks_per_node);
      },
      [&](World& world) { test::check_gpu_nodes(world, cases); }));
}

TEST(NvshmemNodes, two_nodes_of_one_equal_the_simulation) { check_nodes({2, 1}); }
TEST(NvshmemNodes, two_nodes_of_two_equal_the_simulation) { check_nodes({4, 2}); }
TEST(NvshmemNodes, two_nodes_of_four_equal_the_simulation) { check_nodes({8, 4}); }
TEST(NvshmemNodes, four_nodes_of_two_equal_the_simulation) { check_nodes({8, 2}); }

void check_experts(const EPConfig& config, const EPDispatchOptions& options, std::uint64_t number) {
  Random random(number);
  const auto rounds = test::random_rounds(config, options, 8, random);
  test::expect_no_errors(test::run_gpu_processes(
      config.world_size,
      [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_nvshmem_world(std::move(bootstrap), device, config.local_world_size);
      },
      [&](World& world) {
        test::run_rounds(world, config, options, rounds, {8, 1});
      }));
}

TEST(NvshmemNodes, experts_on_two_nodes_of_one) {
  check_experts(test::on_nodes(test::config_of(2, 12, 4, 90, 256), 1), {}, 131);
  check_experts(test::on_nodes(test::config_of(2, 64, 8, 130, 7168), 1), {}, 132);
  check_experts(test::on_nodes(test::config_of(2, 12, 4, 60, 512), 1),
                {.rows = EPRows::compact, .payload = EPPayload::quantized}, 133);
}
TEST(NvshmemNodes, experts_on_two_nodes_of_two) {
  check_experts(test::on_nodes(test::config_of(4, 16, 4, 90, 256), 2), {}, 134);
}
TEST(NvshmemNodes, experts_on_two_nodes_of_four) {
  check_experts(test::on_nodes(test::config_of(8, 16, 4, 60, 256), 4), {}, 135);
}
TEST(NvshmemNodes, experts_on_four_nodes_of_two) {
  check_experts(test::on_nodes(test::config_of(8, 16, 4, 60, 256), 2), {}, 136);
}

TEST(NvshmemNodes, copies_of_experts_on_two_nodes_of_one) {
  const EPConfig config = test::on_nodes(test::config_of(2, 12, 4, 90, 256), 1);
  check_experts(config, test::spare_options(1), 137);
  EPDispatchOptions options = test::spare_options(2);
  options.rows = EPRows::compact;
  options.payload = EPPayload::quantized;
  options.limit = 1.05;
  check_experts(test::on_nodes(test::config_of(2, 12, 4, 60, 512), 1), options, 138);
}
TEST(NvshmemNodes, copies_of_experts_on_two_nodes_of_two) {
  check_experts(test::on_nodes(test::config_of(4, 16, 4, 140, 512), 2), test::spare_options(2),
                139);
}
TEST(NvshmemNodes, copies_of_experts_on_four_nodes_of_two) {
  check_experts(test::on_nodes(test::config_of(8, 32, 4, 60, 256), 2), test::spare_options(2), 140);
}
TEST(NvshmemNodes, copies_that_are_there_are_used_again) {
  const EPConfig config = test::on_nodes(test::config_of(4, 24, 4, 140, 64), 2);
  const auto rounds = test::copy_rounds(config, test::spare_options(2), 141);
  test::expect_no_errors(test::run_gpu_processes(
      config.world_size,
      [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_nvshmem_world(std::move(bootstrap), device, 2);
      },
      [&](World& world) { test::run_copy_rounds(world, config, test::spare_options(2), rounds); }));
}

/// Weights and gradients of copies. @param hooks for a stage that several rounds need
void check_store(std::int32_t ranks, std::int32_t ranks_per_node, const char* hooks) {
  const test::WithHooks with(hooks);
  const auto cases = test::network_copies(ranks);
  test::expect_no_errors(test::run_gpu_processes(
      ranks,
      [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_nvshmem_world(std::move(bootstrap), device, ranks_per_node);
      },
      [&](World& world) { test::run_copies(world, cases); }));
}

TEST(NvshmemNodes, weights_and_gradients_of_copies_on_two_nodes_of_one) { check_store(2, 1, ""); }
TEST(NvshmemNodes, weights_and_gradients_of_copies_on_two_nodes_of_two) {
  check_store(4, 2, "copy_stage_kb=512");
}
TEST(NvshmemNodes, weights_and_gradients_of_copies_on_four_nodes_of_two) {
  check_store(8, 2, "copy_stage_kb=1024");
}

TEST(NvshmemNodes, ranks_that_disagree_are_told_so) {
  test::check_disagreeing_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_nvshmem_world(std::move(bootstrap), device, 1);
      },
      20);
}

TEST(NvshmemNodes, a_killed_rank_of_another_node_is_named) {
  if (num_ranks() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const auto ends = test::run_until_rank_1_dies(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_nvshmem_world(std::move(bootstrap), device, 1);
      },
      Death::before_the_third_call);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  EXPECT_TRUE(test::names_timeout(
      ends[0].text, {.operation = "dispatch", .rank = 0, .peer = 1, .wanted = 3, .seen = 2}, 2,
      10));
}

TEST(NvshmemWorld, two_worlds_of_a_process_share_nvshmem) {
  test::expect_no_errors(test::run_processes(1, [](std::int32_t) {
    for (int i = 0; i < 2; ++i) {
      World world = make_nvshmem_world(std::move(make_thread_bootstraps(1).front()), /*device=*/0);
      SymmetricBuffer buffer = world.transport().allocate(1 << 20, "test");
      world.transport().release(buffer);
    }
  }));
}

TEST(NvshmemWorld, a_missing_library_is_explained_on_all_ranks) {
  const auto ends = test::run_gpu_processes(
      num_ranks(),
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        if (bootstrap->rank() == Rank{0}) (void)setenv("WAYBILL_NVSHMEM_LIBRARY", "/nowhere.so", 1);
        return make_nvshmem_world(std::move(bootstrap), device);
      },
      [](World&) {});
  for (const ProcessEnd& end : ends) {
    EXPECT_NE(end.text.find("NVSHMEM cannot be used"), std::string::npos) << end.text;
    EXPECT_NE(end.text.find("/nowhere.so: cannot open"), std::string::npos) << end.text;
  }
}

}  // namespace
}  // namespace waybill
