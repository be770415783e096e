// As many ranks on a device as its hardware queues hold: their kernels spin side by side, and share
// multiprocessors. CUDA_DEVICE_MAX_CONNECTIONS=32 (scripts/test_gpu.sh).

#include <gtest/gtest.h>

#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_step.h"

namespace waybill {
namespace {

/// A queue for what a rank calls, and one for what it does by itself.
constexpr std::int32_t ranks_of_a_gpu = 16;

TEST(GpuResidentRanks, sequences_equal_the_simulation) {
  const std::int32_t world_size = ranks_of_a_gpu * num_gpus();
  const auto cases = test::sequence_cases(world_size, 2, 1);
  std::vector<test::Expected> expected;
  for (const test::SequenceCase& sample : cases) expected.emplace_back(sample);
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        test::DeviceArena arena(world);
        for (const int num_sms : {4, 1}) {
          SequenceDispatcher dispatcher(world, {.num_sms = num_sms});
          dispatcher.reserve(std::int64_t{16} << 20, {arena.stream()});
          for (std::size_t i = 0; i < cases.size(); ++i) {
            test::check_gpu_step(world, dispatcher, arena, test::step_parts(cases[i]), expected[i],
                                 concat(cases[i].name, ", ", num_sms, " SMs, rank ", world.rank()));
          }
          world.barrier();
          dispatcher.close();
        }
        world.barrier();
      },
      test::world_options());
}

TEST(GpuResidentRanks, experts_equal_the_simulation) {
  const std::int32_t world_size = ranks_of_a_gpu * num_gpus();
  test::check_random(test::config_of(world_size, 2 * world_size, 4, 40, 256), {}, 3, 301, {3});
  test::check_random(test::config_of(world_size, world_size, 8, 150, 128),
                     {.rows = EPRows::compact}, 3, 302, {2});
}

}  // namespace
}  // namespace waybill
