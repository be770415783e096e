#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <thread>

#include "support/run_processes.h"
#include "support/sequence_step.h"
#include "waybill/core/wait.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"

/// A program whose ranks are processes is interrupted in each of its waits: the rank that gets the
/// signal ends soon, the others name it.
namespace waybill {
namespace {

using test::ProcessEnd;
using test::to_size;
using Clock = std::chrono::steady_clock;

constexpr double limit_s = 0.2;
constexpr double margin_s = 0.3;  // other programs may keep this one from running

/// Sends SIGINT to this process a little later.
class Signaller {
 public:
  Signaller()
      : thread_([this] {
          std::this_thread::sleep_for(std::chrono::milliseconds(150));
          sent_ = Clock::now();
          (void)::kill(getpid(), SIGINT);
        }) {}
  /// Once it has been sent.
  double seconds_since() {
    thread_.join();
    return std::chrono::duration<double>(Clock::now() - sent_).count();
  }

 private:
  Clock::time_point sent_;
  std::jthread thread_;
};

using Wait = std::function<void(World&)>;

/// Rank 1 is alone in `wait`, and is interrupted there; then it stays for a while. The others do
/// `meanwhile`, which waits for it as well.
std::vector<ProcessEnd> interrupt_rank_1(const Wait& wait, const Wait& meanwhile) {
  const test::MeetingFolder folder;
  const auto start = Clock::now();
  auto ends = test::run_processes(3, [&](std::int32_t rank) {
    const EndWaitsOnSigint guard;
    World world = make_process_world(make_file_bootstrap(rank, 3, folder.path(), 60));
    if (rank != 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return meanwhile(world);
    }
    Signaller signaller;
    try {
      wait(world);
      ADD_FAILURE() << "expected Interrupted";
    } catch (const Interrupted&) {
      EXPECT_LT(signaller.seconds_since(), limit_s + margin_s);
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
      throw;
    }
  });
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(8));
  EXPECT_EQ(ends[1].text, "interrupted by SIGINT");
  for (const std::int32_t r : {0, 2}) {
    EXPECT_NE(ends[r].text.find("rank 1 failed: interrupted by SIGINT"), std::string::npos)
        << ends[r].text;
  }
  return ends;
}

TEST(ProcessInterrupts, Barrier) {
  const Wait barrier = [](World& world) { world.barrier(); };
  (void)interrupt_rank_1(barrier, barrier);
}

TEST(ProcessInterrupts, MakingADispatcher) {
  const Wait make = [](World& world) { SequenceDispatcher dispatcher(world); };
  (void)interrupt_rank_1(make, make);
}

/// All ranks make a dispatcher; what happens later is collective as well.
std::vector<ProcessEnd> interrupt_in_dispatcher(
    const std::function<void(SequenceDispatcher&, std::size_t rank)>& call) {
  const test::MeetingFolder folder;
  return test::run_processes(3, [&](std::int32_t rank) {
    const EndWaitsOnSigint guard;
    World world = make_process_world(make_file_bootstrap(rank, 3, folder.path(), 60));
    SequenceDispatcher dispatcher(world);
    world.barrier();
    if (rank != 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return call(dispatcher, rank);
    }
    std::optional<Signaller> signaller(std::in_place);
    try {
      call(dispatcher, rank);
      ADD_FAILURE() << "expected Interrupted";
    } catch (const Interrupted&) {
      EXPECT_LT(signaller->seconds_since(), limit_s + margin_s);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    call(dispatcher, rank);
  });
}

void expect_all_told(const std::vector<ProcessEnd>& ends, const std::string& operation) {
  EXPECT_EQ(ends[1].text, operation +
                              ": the dispatcher is unusable after an interrupt: "
                              "interrupted by SIGINT");
  for (const std::int32_t r : {0, 2}) {
    EXPECT_NE(ends[r].text.find("rank 1 failed: interrupted by SIGINT"), std::string::npos)
        << ends[r].text;
  }
}

TEST(ProcessInterrupts, Dispatch) {
  const auto sample = test::sequence_cases(3, 0).at(3);
  const test::Expected expected(sample);
  expect_all_told(interrupt_in_dispatcher([&](SequenceDispatcher& dispatcher, std::size_t r) {
                    const auto parts = test::forward_parts(sample);
                    const auto plan = dispatcher.plan_dispatch(parts);
                    (void)dispatcher.dispatch(plan, std::vector<ConstTensorView>{
                                                        expected.q[r].view(), expected.k[r].view(),
                                                        expected.v[r].view()});
                  }),
                  "dispatch");
}

TEST(ProcessInterrupts, Growth) {
  expect_all_told(interrupt_in_dispatcher([&](SequenceDispatcher& dispatcher, std::size_t /*r*/) {
                    dispatcher.reserve(dispatcher.window_bytes() + (1 << 20));
                  }),
                  "reserve");
}

TEST(ProcessInterrupts, MeetingInFiles) {
  const test::MeetingFolder folder;
  const auto ends = test::run_processes(1, [&](std::int32_t /*rank*/) {
    const EndWaitsOnSigint guard;
    const auto bootstrap = make_file_bootstrap(0, 2, folder.path(), 60);
    Signaller signaller;
    try {
      bootstrap->barrier("nobody comes");
    } catch (const Interrupted&) {
      EXPECT_LT(signaller.seconds_since(), limit_s + margin_s);
    }
    bootstrap->barrier("again");
  });
  EXPECT_EQ(ends[0].text,
            "again: the bootstrap is unusable after an interrupt: interrupted by SIGINT");
}

}  // namespace
}  // namespace waybill
