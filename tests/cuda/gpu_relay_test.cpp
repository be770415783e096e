#include <gtest/gtest.h>

#include "cuda/gpu_step.h"
#include "support/node_case.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill {
namespace {

using test::Way;

/// Relays wherever there are schedules; small batches make many, large ones few.
std::vector<Way> relay_ways() {
  std::vector<Way> all;
  for (const Way& way : test::ways(1)) {
    if (way.options.num_sms == 0) continue;  // copy engines forward nothing
    for (const std::int64_t batch_bytes : {256, 0}) {
      Way& relayed = all.emplace_back(way);
      relayed.options.plan.relay = RelayUse::always;
      relayed.options.plan.batch_bytes = batch_bytes;
    }
  }
  return all;
}

/// Random schedules in which anybody forwards to anybody, over plans of all kinds.
void check_relays(std::int32_t world_size, int num_random, std::int64_t scale) {
  const auto cases =
      test::node_cases({world_size, world_size}, test::num_random_cases(num_random), scale);
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        test::DeviceArena arena(world);
        for (const Way& way : relay_ways()) {
          SequenceDispatcher dispatcher(world, way.options);
          dispatcher.reserve(std::int64_t{64} << 20, {arena.stream()});
          for (const auto& node : cases) {
            const std::string name =
                concat(way.name, ", batches of ", way.options.plan.batch_bytes, ", ",
                       node->sample.name, ", rank ", world.rank(), " of ", world_size);
            test::check_gpu_step(world, dispatcher, arena, node->parts(), node->expected, name);
          }
          world.barrier();
          dispatcher.close();
        }
        world.barrier();
      },
      test::world_options());
}

TEST(GpuRelay, two_ranks_equal_the_simulation) { check_relays(2, 16, 1); }
TEST(GpuRelay, four_ranks_equal_the_simulation) { check_relays(4, 16, 5); }
TEST(GpuRelay, eight_ranks_equal_the_simulation) { check_relays(8, 8, 3); }

}  // namespace
}  // namespace waybill
