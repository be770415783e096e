#include "waybill/core/wait.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <limits>
#include <memory>
#include <thread>

#include "support/expect_error.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Waits for nothing until somebody ends it. @return seconds waited
template <class Expected>
double wait_for_end(double timeout_s = 10) {
  PollingWait wait(timeout_s);
  EXPECT_THROW(while (wait.pause()){}, Expected);
  return wait.waited_s();
}

TEST(PollingWait, EndsAtItsDeadline) {
  for (const double timeout : {1e-4, 0.05}) {
    PollingWait wait(timeout);
    while (wait.pause()) {
    }
    EXPECT_GE(wait.waited_s(), timeout);
    EXPECT_LT(wait.waited_s(), timeout + 0.5);
  }
}

TEST(PollingWait, LongAndEndlessDeadlinesDoNotOverflow) {
  for (const double timeout : {1e10, 1e300, std::numeric_limits<double>::infinity()}) {
    PollingWait wait(timeout);
    const auto start = Clock::now();
    while (seconds_since(start) < 0.02) ASSERT_TRUE(wait.pause()) << timeout;
  }
}

TEST(PollingWait, AFailedScopeEndsIt) {
  const auto scope = std::make_shared<FailureScope>();
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    scope->fail("rank 1 failed: no luck");
    scope->fail("rank 2 failed: later");
  });
  {
    const EnteredWaitScope entered(scope);
    EXPECT_LT(wait_for_end<PeerFailed>(), 0.2);
    try {
      check_interrupt();
      ADD_FAILURE() << "expected PeerFailed";
    } catch (const PeerFailed& error) {
      EXPECT_STREQ(error.what(), "rank 1 failed: no luck");
    }
  }
  other.join();
  check_interrupt();  // the scope was left
}

TEST(PollingWait, AllScopesOfTheThreadAreAsked) {
  const auto outer = std::make_shared<FailureScope>();
  const auto inner = std::make_shared<FailureScope>();
  const EnteredWaitScope entered(outer);
  {
    const EnteredWaitScope nested(inner);
    check_interrupt();
    inner->fail("the inner one");
    EXPECT_THROW(check_interrupt(), PeerFailed);
  }
  check_interrupt();
  const EnteredWaitScope fresh(std::make_shared<FailureScope>());
  outer->interrupt("by the user");
  EXPECT_THROW(check_interrupt(), Interrupted);
  std::thread([] { check_interrupt(); }).join();  // another thread has not entered it
}

TEST(PollingWait, ItsOwnCheckIsAskedToo) {
  PollingWait wait(10, {.check = [] { throw PeerFailed("rank 1 is gone"); }});
  EXPECT_THROW(while (wait.pause()){}, PeerFailed);
  EXPECT_LT(wait.waited_s(), 0.2);
}

TEST(FailureScope, SaysOnceThatItHasEnded) {
  FailureScope scope;
  int calls = 0;
  auto kept = scope.on_end([&] { ++calls; });
  auto gone = scope.on_end([&] { calls += 100; });
  gone.reset();
  EXPECT_FALSE(scope.has_ended());
  scope.fail("no luck");
  scope.interrupt("later");
  EXPECT_TRUE(scope.has_ended());
  EXPECT_EQ(calls, 1);
  const auto late = scope.on_end([&] { ++calls; });
  EXPECT_EQ(calls, 2);
}

TEST(CheckTimeout, RefusesWhatIsNoDeadline) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (const double timeout : {1e-9, 1.0, 1e9}) check_timeout("test", timeout);
  for (const double timeout : {0.0, -1.0, 1e10, inf, -inf, std::nan("")}) {
    EXPECT_TRUE(test::rejects([&] { check_timeout("test", timeout); },
                              {concat("test: timeout_s = ", timeout), "at most 1e+09 seconds"}));
  }
}

TEST(PollingWait, AnInstalledCheckEndsIt) {
  const InterruptCheck before = set_interrupt_check([] { throw Interrupted("somebody said so"); });
  EXPECT_LT(wait_for_end<Interrupted>(), 0.2);
  EXPECT_NE(set_interrupt_check(before), nullptr);
  check_interrupt();
}

TEST(EndWaitsOnSigint, EveryThreadIsTold) {
  const EndWaitsOnSigint guard;
  double waited = 10;
  std::thread other([&] { waited = wait_for_end<Interrupted>(); });
  ASSERT_EQ(kill(getpid(), SIGINT), 0);
  EXPECT_LT(wait_for_end<Interrupted>(), 0.2);
  other.join();
  EXPECT_LT(waited, 0.2);
}

TEST(EndWaitsOnSigint, ShortWaitsAreEndedToo) {  // as those of a loop of calls between fast ranks
  const EndWaitsOnSigint guard;
  PollingWait before(10);
  EXPECT_TRUE(before.pause());
  (void)raise(SIGINT);
  PollingWait after(10);
  EXPECT_THROW((void)after.pause(), Interrupted);
}

TEST(EndWaitsOnSigint, TheSecondEndsTheProgram) {
  const pid_t child = fork();
  if (child == 0) {
    const EndWaitsOnSigint guard;
    (void)raise(SIGINT);
    (void)raise(SIGINT);
    _exit(3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
}

TEST(EndWaitsOnSigint, AfterwardsNothingIsLeft) {
  {
    const EndWaitsOnSigint guard;
    (void)raise(SIGINT);
    EXPECT_THROW(check_interrupt(), Interrupted);
  }
  check_interrupt();
}

/// Counts how often a wait lets others in.
class CountedTurn final : public WaitTurn {
 public:
  void let_others() noexcept override { ++count; }
  int count = 0;
};

TEST(WaitTurn, IsGivenAwayByWaitsThatMay) {
  CountedTurn outer;
  CountedTurn inner;
  PollingWait keeps(1.0);
  PollingWait gives(1.0, {.gives_turn = true});
  EXPECT_TRUE(gives.pause());  // nobody has a turn
  {
    const EnteredWaitTurn entered(outer);
    EXPECT_TRUE(keeps.pause());
    EXPECT_EQ(outer.count, 0);
    {
      const EnteredWaitTurn within(inner);
      EXPECT_TRUE(gives.pause());
    }
    EXPECT_TRUE(gives.pause());
    std::thread([&] { EXPECT_TRUE(PollingWait(1.0, {.gives_turn = true}).pause()); }).join();
  }
  EXPECT_TRUE(gives.pause());
  EXPECT_EQ(outer.count, 1);
  EXPECT_EQ(inner.count, 1);
}

}  // namespace
}  // namespace waybill
