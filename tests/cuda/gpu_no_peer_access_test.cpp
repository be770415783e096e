// Worlds of GPUs that are said not to reach each other: rows go through memory of the host, and all
// is as it is without.

#include <gtest/gtest.h>

#include <cstdlib>

#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_nodes.h"
#include "cuda/gpu_processes.h"
#include "cuda/transport/gpu_transport.h"

namespace waybill {
namespace {

class NoPeerAccess {
 public:
  NoPeerAccess() { (void)setenv("WAYBILL_PEER_ACCESS", "none", 1); }
  NoPeerAccess(const NoPeerAccess&) = delete;
  NoPeerAccess& operator=(const NoPeerAccess&) = delete;
  ~NoPeerAccess() { (void)unsetenv("WAYBILL_PEER_ACCESS"); }
};

void expect_host_memory(World& world) {
  EXPECT_EQ(dynamic_cast<cuda::GpuTransport&>(world.transport()).peer_memory(), PeerMemory::host);
}

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
  test::expect_no_errors(test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_gpu_process_world(std::move(bootstrap), device);
      },
      [&](World& world) {
        expect_host_memory(world);
        cases.check(world);
      }));
}

TEST(GpuNoPeerAccess, experts_of_processes_equal_the_simulation) {
  const NoPeerAccess forced;
  const EPConfig config = test::config_of(2, 12, 4, 90, 256);
  Random random(5);
  const auto rounds = test::random_rounds(config, {}, 5, random);
  test::expect_no_errors(test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        return make_gpu_process_world(std::move(bootstrap), device);
      },
      [&](World& world) {
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

}  // namespace
}  // namespace waybill
