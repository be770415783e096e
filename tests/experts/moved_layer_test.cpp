// Layers that are moved, and that outlive the world's own handle.
#include <gtest/gtest.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "experts/expert_rounds.h"

namespace waybill::test {
namespace {

static_assert(std::is_nothrow_move_constructible_v<EPAll2AllLayer>);
static_assert(std::is_nothrow_move_assignable_v<EPAll2AllLayer>);
static_assert(!std::is_copy_constructible_v<EPAll2AllLayer>);

EPConfig small_config() {
  EPConfig config;
  config.max_tokens = 7;
  config.hidden = 24;
  config.topk = 2;
  config.num_experts = 8;
  config.world_size = 4;
  config.local_world_size = 2;
  return config;
}

TEST(MovedLayer, GoesOnWhereItWas) {
  Random random(5);
  const EPConfig config = small_config();
  const ExpertRoundCase round =
      make_round(random_case(config, random, {.edges = false}), {}, random);
  run_thread_world(4,
                   [&](World& world) {
                     const auto rank = static_cast<std::size_t>(to_int(world.rank()));
                     const auto check = [&](EPAll2AllLayer& layer) {
                       const EPDispatched got = layer.dispatch(input_of(round, rank));
                       expect_dispatched(got, round, rank);
                       expect_combined(layer, *got.layout, round, rank);
                     };
                     EPAll2AllLayer first(world, at_rank(config, world));
                     check(first);
                     const EPDispatched kept = first.dispatch(input_of(round, rank));
                     EPAll2AllLayer second = std::move(first);
                     expect_combined(second, *kept.layout, round, rank);  // a layout of before
                     check(second);
                     EPAll2AllLayer other(world, at_rank(config, world));
                     other = std::move(second);
                     check(other);
                     other.finalize();
                   },
                   {.ranks_per_node = 2});
}

TEST(MovedLayer, HoldsItsWorld) {
  Random random(6);
  EPConfig config = small_config();
  config.local_world_size = 4;
  const ExpertRoundCase round =
      make_round(random_case(config, random, {.edges = false}), {}, random);
  run_ranks_as_threads(4, [&](std::shared_ptr<Bootstrap> bootstrap) {
    std::unique_ptr<EPAll2AllLayer> layer;
    std::size_t rank = 0;
    {
      const World world = make_thread_world(std::move(bootstrap));
      rank = static_cast<std::size_t>(to_int(world.rank()));
      EPConfig mine = config;
      mine.rank = to_int(world.rank());
      layer = std::make_unique<EPAll2AllLayer>(world, mine);
    }
    expect_dispatched(layer->dispatch(input_of(round, rank)), round, rank);
    layer->finalize();
  });
}

}  // namespace
}  // namespace waybill::test
