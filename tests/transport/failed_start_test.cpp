// A rank that cannot go on says so, and the others name it at once: over TCP and through files.

#include <gtest/gtest.h>

#include <latch>

#include "support/rendezvous.h"
#include "support/run_processes.h"
#include "support/run_ranks.h"
#include "waybill/core/wait.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

using test::error_of;
using test::holds;
using test::RankResult;
using test::Stopwatch;

constexpr double timeout_s = 30;

/// Where the ranks of one test meet.
class Place : public testing::TestWithParam<bool> {
 protected:
  void expect_named(std::int32_t victim) const;
  void expect_interruptible(std::int32_t rank) const;

  [[nodiscard]] LaunchEnvironment environment(std::int32_t rank, std::int32_t world_size) const {
    LaunchEnvironment result;
    result.rank = rank;
    result.world_size = world_size;
    result.rendezvous = GetParam() ? concat("tcp://127.0.0.1:", port_) : "file://" + folder_.path();
    return result;
  }
  [[nodiscard]] std::unique_ptr<Bootstrap> make(std::int32_t rank, std::int32_t world_size,
                                                double patience_s = timeout_s) const {
    return make_environment_bootstrap(environment(rank, world_size), patience_s);
  }
  void TearDown() override { EXPECT_LT(watch_.seconds(), 8); }

 private:
  test::MeetingFolder folder_;
  std::uint16_t port_ = test::free_port();
  Stopwatch watch_;
};

void Place::expect_named(std::int32_t victim) const {
  std::latch over(3);
  const auto results = test::run_ranks(4, [&](std::int32_t rank) {
    const auto bootstrap = make(rank, 4);
    bootstrap->barrier("first");  // all are there
    if (rank == victim) {
      over.count_down();
      (void)fail_on_error(*bootstrap,
                          []() -> int { throw InvalidArgument("device = 9, expected 0..1"); });
    }
    if (rank == 1) return over.wait();  // late
    const std::string error = error_of([&] { bootstrap->barrier("second"); });
    over.count_down();
    EXPECT_TRUE(
        holds(error, concat("second: rank ", victim, " failed: device = 9, expected 0..1")));
    EXPECT_TRUE(
        holds(error_of([&] { bootstrap->barrier("third"); }), "third: the bootstrap is unusable"));
  });
  EXPECT_EQ(results[static_cast<std::size_t>(victim)].text, "device = 9, expected 0..1");
}

TEST_P(Place, TheRankThatFailsIsNamedWhileAnotherIsLate) { expect_named(2); }

TEST_P(Place, Rank0IsNamedWhileAnotherIsLate) { expect_named(0); }

TEST_P(Place, ARankThatLeavesWithoutAWordIsNamedWhileAnotherIsLate) {
  std::latch over(2);
  test::expect_no_errors(test::run_ranks(4, [&](std::int32_t rank) {
    auto bootstrap = make(rank, 4);
    bootstrap->barrier("first");  // all are there
    if (rank == 2) return bootstrap.reset();
    if (rank == 1) return over.wait();
    EXPECT_TRUE(
        holds(error_of([&] { bootstrap->barrier("second"); }), "second: rank 2 left (seen"));
    over.count_down();
  }));
}

TEST_P(Place, WhatWasGivenBeforeCounts) {
  std::latch given(1);
  test::expect_no_errors(test::run_ranks(3, [&](std::int32_t rank) {
    const auto bootstrap = make(rank, 3);
    if (rank == 2) given.wait();
    if (rank == 1) {
      std::jthread counts([&] {
        test::sleep_s(0.2);
        given.count_down();
      });
      EXPECT_EQ(all_gather_value(*bootstrap, rank, "first").size(), 3U);
      return bootstrap->fail("\x1b[2Jafter the first");
    }
    EXPECT_EQ(all_gather_value(*bootstrap, rank, "first").size(), 3U);
    EXPECT_TRUE(holds(error_of([&] { bootstrap->barrier("second"); }),
                      "second: rank 1 failed:  [2Jafter the first"));
  }));
}

TEST_P(Place, ARankThatFailsBeforeAllAreThereIsNamedAlsoByThoseThatComeLate) {
  testing::internal::CaptureStderr();
  std::latch failed(1);
  const auto results = test::run_ranks(4, [&](std::int32_t rank) {
    if (rank == 1) {
      report_failed_start(environment(1, 4), "no such GPU");
      return failed.count_down();
    }
    if (rank == 3) {
      failed.wait();
      test::sleep_s(0.3);
    }
    make(rank, 4)->barrier("first");
  });
  (void)testing::internal::GetCapturedStderr();
  for (const std::size_t r : {0U, 2U, 3U}) {
    EXPECT_TRUE(holds(results[r].text, "rank 1 failed: no such GPU"));
  }
}

TEST_P(Place, Rank0ThatCannotStartIsNamed) {
  testing::internal::CaptureStderr();
  const auto results = test::run_ranks(3, [&](std::int32_t rank) {
    if (rank == 0) return report_failed_start(environment(0, 3), "no such GPU");
    test::sleep_s(0.1 * rank);
    make(rank, 3)->barrier("first");
  });
  (void)testing::internal::GetCapturedStderr();
  for (const std::size_t r : {1U, 2U}) {
    EXPECT_TRUE(holds(results[r].text, "rank 0 failed: no such GPU"));
  }
}

TEST_P(Place, ReportingTakesNoLongerThanItMay) {
  for (const std::int32_t rank : {0, 1}) {
    const Stopwatch watch;
    report_failed_start(environment(rank, 2), "alone", 0.2);
    EXPECT_LT(watch.seconds(), 1);
  }
}

/// check_interrupt() throws on all threads from the moment that it is set.
std::atomic<bool> interrupted = false;

void Place::expect_interruptible(std::int32_t rank) const {
  const InterruptCheck before = set_interrupt_check([] {
    if (interrupted) throw Interrupted("Ctrl-C");
  });
  interrupted = false;
  Stopwatch since_interrupt;
  std::jthread user([&] {
    test::sleep_s(0.3);
    since_interrupt = {};
    interrupted = true;
  });
  EXPECT_EQ(error_of([&] { make(rank, 3)->barrier("first"); }), "Ctrl-C");  // nobody else comes
  EXPECT_LT(since_interrupt.seconds(), 0.2);
  user.join();
  (void)set_interrupt_check(before);
}

TEST_P(Place, Rank0CanBeInterrupted) { expect_interruptible(0); }

TEST_P(Place, OtherRanksCanBeInterrupted) { expect_interruptible(1); }

INSTANTIATE_TEST_SUITE_P(FailedStart, Place, testing::Values(true, false),
                         [](const auto& param) { return param.param ? "tcp" : "file"; });

}  // namespace
}  // namespace waybill
