// Dispatchers that are moved, and that outlive the world's own handle.
#include <gtest/gtest.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "support/sequence_step.h"

namespace waybill {
namespace {

using test::check_step;
using test::Expected;

static_assert(std::is_nothrow_move_constructible_v<SequenceDispatcher>);
static_assert(std::is_nothrow_move_assignable_v<SequenceDispatcher>);
static_assert(!std::is_copy_constructible_v<SequenceDispatcher>);

TEST(MovedDispatcher, goes_on_where_it_was) {
  const auto sample = test::sequence_cases(3, 0).at(3);
  const Expected expected(sample);
  run_thread_world(3, [&](World& world) {
    SequenceDispatcher first(world);
    check_step(world, first, sample, expected);
    SequenceDispatcher second = std::move(first);
    check_step(world, second, sample, expected);  // windows and numbers of calls came along
    SequenceDispatcher other(world);
    other = std::move(second);  // what it had goes with the world
    check_step(world, other, sample, expected);
    auto& self = other;
    other = std::move(self);
    check_step(world, other, sample, expected);
    other.close();
    SequenceDispatcher closed = std::move(other);
    EXPECT_THROW(check_step(world, closed, sample, expected), TransportError);
  });
}

TEST(MovedDispatcher, holds_its_world) {
  const auto sample = test::sequence_cases(2, 0).at(3);
  const Expected expected(sample);
  run_ranks_as_threads(2, [&](std::shared_ptr<Bootstrap> bootstrap) {
    std::optional<SequenceDispatcher> dispatcher;
    std::optional<World> copy;
    {
      World world = make_thread_world(std::move(bootstrap));
      dispatcher.emplace(world);
      copy = world;
      const World moved = std::move(world);
      EXPECT_TRUE(moved);
      EXPECT_FALSE(world);  // NOLINT(bugprone-use-after-move)
    }
    EXPECT_EQ(copy->world_size(), 2);
    check_step(*copy, *dispatcher, sample, expected);
    copy.reset();  // the dispatcher's is the last handle now
    dispatcher->close();
  });
}

}  // namespace
}  // namespace waybill
