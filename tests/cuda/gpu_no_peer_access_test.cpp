// Worlds of GPUs that are said not to reach each other: rows go through memory of the host, and all
// is as it is without.

#include <gtest/gtest.h>

#include <cstdlib>

#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_nodes.h"
#include "cuda/gpu_processes.h"
#include "cuda/transport/gpu_place.h"
#include "cuda/transport/gpu_transport.h"
#include "support/with_hooks.h"

namespace waybill {
namespace {

class NoPeerAccess {
 public:
  NoPeerAccess() { (void)setenv("WAYBILL_PEER_ACCESS", "none", 1); }
  NoPeerAccess(const NoPeerAccess&) = delete;
  NoPeerAccess& operator=(const NoPeerAccess&) = delete;
  ~NoPeerAccess() { (void)unsetenv("WAYBILL_PEER_ACCESS"); }
};

World process_world(std::shared_ptr<Bootstrap> bootstrap, int device) {
  return make_gpu_process_world(std::move(bootstrap), device);
}

PeerMemory memory_of(World& world) {
  return dynamic_cast<cuda::GpuTransport&>(world.transport()).peer_memory();
}

void expect_host_memory(World& world) { EXPECT_EQ(memory_of(world), PeerMemory::host); }

TEST(GpuNoPeerAccess, threads_equal_the_simulation) {
  const NoPeerAccess forced;
  const test::CasesOnGpu cases(2, 8, 1);
  run_gpu_thread_world(
      2,
      [&](World& world) {
        expect_host_memory(world);
        cases.check(world);
      },
      test::world_options());
}

TEST(GpuNoPeerAccess, experts_of_threads_equal_the_simulation) {
  const NoPeerAccess forced;
  test::check_random(test::config_of(2, 8, 4, 150, 128), {}, 6, 2, {8, 1});
  test::check_random(test::config_of(2, 16, 8, 100, 512), {.rows = EPRows::compact}, 6, 3, {8});
}

TEST(GpuNoPeerAccess, processes_equal_the_simulation) {
  const NoPeerAccess forced;
  const test::CasesOnGpu cases(2, 6, 1);
  test::expect_no_errors(test::run_gpu_processes(2, process_world, [&](World& world) {
    expect_host_memory(world);
    cases.check(world);
  }));
}

TEST(GpuNoPeerAccess, experts_of_processes_equal_the_simulation) {
  const NoPeerAccess forced;
  const EPConfig config = test::config_of(2, 12, 4, 90, 256);
  Random random(5);
  const auto rounds = test::random_rounds(config, {}, 5, random);
  test::expect_no_errors(test::run_gpu_processes(2, process_world, [&](World& world) {
    test::run_rounds(world, config, {}, rounds, {8, 2});
  }));
}

TEST(GpuNoPeerAccess, logical_nodes_equal_the_simulation) {
  const NoPeerAccess forced;
  const auto cases = test::node_cases({2, 1}, 4, 3);
  ThreadWorldOptions options = test::world_options();
  options.ranks_per_node = 1;
  run_gpu_thread_world(
      2, [&](World& world) { test::check_gpu_nodes(world, cases); }, options);
}

// Processes that do not see each other's GPUs, as with one GPU each by CUDA_VISIBLE_DEVICES or a
// container for each. On one GPU they are told that they do not.

TEST(GpuNoPeerAccess, unseen_gpus_that_can_be_mapped_are_used) {
  const test::WithHooks unseen("unseen_gpus=1");
  const test::CasesOnGpu cases(2, 4, 1);
  test::expect_no_errors(test::run_gpu_processes(2, process_world, [&](World& world) {
    EXPECT_EQ(memory_of(world), PeerMemory::device);
    cases.check(world);
  }));
}

TEST(GpuNoPeerAccess, unseen_gpus_that_cannot_be_mapped_mean_memory_of_the_host) {
  const test::WithHooks unseen("unmappable_gpus=1");
  const test::CasesOnGpu cases(3, 4, 1);
  test::expect_no_errors(test::run_gpu_processes(3, process_world, [&](World& world) {
    expect_host_memory(world);
    cases.check(world);
  }));
}

TEST(GpuNoPeerAccess, one_rank_refuses_for_all) {
  const test::WithHooks unseen("unmappable_gpus=1");
  const auto ends = test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        if (bootstrap->rank() == Rank{1}) (void)setenv("WAYBILL_PEER_ACCESS", "required", 1);
        return process_world(std::move(bootstrap), device);
      },
      [](World&) {});
  for (const test::ProcessEnd& end : ends) {
    EXPECT_NE(end.text.find("rank 0: device"), std::string::npos) << end.text;
    EXPECT_NE(end.text.find("whose GPU this process does not see"), std::string::npos) << end.text;
    EXPECT_NE(end.text.find("rank 1: WAYBILL_PEER_ACCESS = required"), std::string::npos)
        << end.text;
  }
}

TEST(GpuNoPeerAccess, a_wrong_wish_of_one_rank_is_told_to_all) {
  const auto ends = test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        if (bootstrap->rank() == Rank{1}) (void)setenv("WAYBILL_PEER_ACCESS", "maybe", 1);
        return process_world(std::move(bootstrap), device);
      },
      [](World&) {});
  for (const test::ProcessEnd& end : ends) {
    EXPECT_NE(end.text.find("WAYBILL_PEER_ACCESS = \"maybe\", expected none or required"),
              std::string::npos)
        << end.text;
  }
}

/// With two GPUs and more each process sees another one alone; on one GPU all see that.
TEST(GpuNoPeerAccess, processes_with_a_visible_gpu_each) {
  const int gpus = test::num_gpus_seen_by_a_child();
  const test::CasesOnGpu cases(2, 4, 1);
  const test::MeetingFolder folder;
  test::expect_no_errors(test::run_processes(2, [&](std::int32_t rank) {
    (void)setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank % gpus).c_str(), 1);
    World world = process_world(make_file_bootstrap(rank, 2, folder.path(), 60), 0);
    cases.check(world);
  }));
}

TEST(GpuNoPeerAccess, equal_process_numbers_of_two_containers_are_two_processes) {
  std::vector<cuda::GpuPlace> places(2, {.host = 1, .process = 1, .gpu = {}, .pids = 7});
  EXPECT_THROW(cuda::require_own_processes(places, "world"), Unsupported);
  EXPECT_FALSE(cuda::shares_gpu_with_processes(places, Rank{0}));
  places[1].pids = 8;
  EXPECT_NO_THROW(cuda::require_own_processes(places, "world"));
  EXPECT_TRUE(cuda::shares_gpu_with_processes(places, Rank{0}));
}

}  // namespace
}  // namespace waybill
