// Speeds of a machine's links, given to a world.

#include <gtest/gtest.h>

#include "support/run_ranks.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill {
namespace {

constexpr LinkSpeeds slow{.nvlink_bytes_per_second = 60e9,
                          .network_bytes_per_second = 5e9,
                          .block_bytes_per_second = 20e9};

TEST(LinkSpeeds, dispatchers_take_those_of_their_world) {
  run_thread_world(2, [](World& world) {
    EXPECT_EQ(world.links(), LinkSpeeds{});
    SequenceDispatcher before(world);
    world.use_links(slow);
    EXPECT_EQ(world.links(), slow);
    SequenceDispatcher after(world);
    EXPECT_EQ(before.options().plan.nvlink_bytes_per_second, 345e9);
    EXPECT_EQ(after.options().plan.nvlink_bytes_per_second, 60e9);
    EXPECT_EQ(after.options().plan.network_bytes_per_second, 5e9);
    SequenceDispatcherOptions own;
    own.plan.network_bytes_per_second = 7e9;
    SequenceDispatcher with_own(world, own);
    EXPECT_EQ(with_own.options().plan.network_bytes_per_second, 7e9);
    EXPECT_EQ(with_own.options().plan.nvlink_bytes_per_second, 345e9);
  });
}

TEST(LinkSpeeds, ranks_give_the_same) {
  const auto results = test::run_with_bootstrap(3, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    World world = make_thread_world(std::move(bootstrap));
    LinkSpeeds mine = slow;
    if (world.rank() == Rank{2}) mine.block_bytes_per_second = 30e9;
    world.use_links(mine);
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.text,
              "World::use_links: rank 2 with block_bytes_per_second = 3e+10, the others 2e+10, "
              "expected the same on all ranks");
  }
}

TEST(LinkSpeeds, wrong_ones_are_refused) {
  run_thread_world(1, [](World& world) {
    EXPECT_THROW(world.use_links({.nvlink_bytes_per_second = 0}), InvalidArgument);
    EXPECT_EQ(world.links(), LinkSpeeds{});
  });
}

}  // namespace
}  // namespace waybill
