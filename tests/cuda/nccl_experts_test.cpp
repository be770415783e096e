// Experts between simulated hosts that NCCL connects over TCP. Ranks are processes; nodes share the
// GPUs, and their kernels take turns: deadlines are long.

#include <gtest/gtest.h>

#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_processes.h"
#include "cuda/simulated_hosts.h"

namespace waybill {
namespace {

using test::config_of;
using test::on_nodes;
using test::SimulatedHosts;

constexpr double long_timeout_s = 40;

void check(const EPConfig& config, const EPDispatchOptions& options, std::uint64_t number) {
  Random random(number);
  const auto rounds = test::random_rounds(config, options, 7, random);
  test::expect_no_errors(test::run_gpu_processes(
      config.world_size, SimulatedHosts{config.local_world_size},
      [&](World& world) {
        test::run_rounds(world, config, options, rounds, {8, 2});
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

}  // namespace
}  // namespace waybill
