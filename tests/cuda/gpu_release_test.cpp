// Some of these lose the device for the process: run them one by one (ctest and scripts/test_gpu.sh
// do).

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "cuda/device_arena.h"
#include "cuda/gpu_processes.h"
#include "support/sequence_expected.h"
#include "waybill/core/wait.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"

/// Ranks on GPUs that fail, or are interrupted, while others wait for them: nobody waits the
/// deadline out, neither on the host nor on the device, where memory could not be freed before.
namespace waybill {
namespace {

using test::DeviceArena;
using test::Expected;
using test::to_size;
using Clock = std::chrono::steady_clock;

constexpr double long_timeout_s = 60;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct OwnError : std::runtime_error {
  OwnError() : std::runtime_error("no luck") {}
};

/// A rank with a dispatcher and a plan by which all ranks send to all.
class Rig {
 public:
  Rig(World& world, const test::SequenceCase& sample, const Expected& expected, int num_sms)
      : arena_(world, std::int64_t{16} << 20),
        dispatcher_(world, {.num_sms = num_sms}),
        plan_(dispatcher_.plan_dispatch(test::forward_parts(sample), stream())) {
    dispatcher_.reserve(std::int64_t{1} << 20, stream());
    const std::size_t r = to_int(world.rank());
    inputs_ = {arena_.upload(expected.q[r]), arena_.upload(expected.k[r]),
               arena_.upload(expected.v[r])};
  }
  void dispatch() { (void)dispatcher_.dispatch(plan_, inputs_, stream()); }
  void synchronize() { dispatcher_.synchronize(stream()); }

 private:
  [[nodiscard]] Stream stream() const { return {arena_.stream()}; }

  DeviceArena arena_;
  SequenceDispatcher dispatcher_;
  PlanHandle plan_;
  std::vector<ConstTensorView> inputs_;
};

/// Rank 1 throws before its third call; the others have queued theirs. Where ranks share a device
/// they are told before the memory of the one that throws is freed, which would wait for their
/// kernels: too early to know what it throws.
void a_rank_that_throws_releases_the_others(std::int32_t world_size, int num_sms) {
  const std::string told = num_gpus() < world_size ? "an exception" : "no luck";
  const auto sample = test::sequence_cases(world_size, 0).at(3);
  const Expected expected(sample);
  std::atomic<int> released = 0;
  Clock::time_point thrown;
  const auto body = [&](World& world) {
    Rig rig(world, sample, expected, num_sms);
    for (int call = 0; call < 2; ++call) rig.dispatch();
    rig.synchronize();
    if (world.rank() == Rank{1}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the others wait by then
      thrown = Clock::now();
      throw OwnError();
    }
    rig.dispatch();
    try {
      rig.synchronize();
      ADD_FAILURE() << "expected PeerFailed";
    } catch (const PeerFailed& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 failed: " + told), std::string::npos)
          << error.what();
      ++released;
    }
    EXPECT_LT(seconds_since(thrown), 1.0);
    EXPECT_THROW(rig.dispatch(), TransportError);
  };
  EXPECT_THROW(run_gpu_thread_world(world_size, body, {.timeout_s = long_timeout_s}), OwnError);
  EXPECT_EQ(released, world_size - 1);
  EXPECT_LT(seconds_since(thrown), 10.0);  // what they had on their devices is freed
}

TEST(GpuRelease, a_rank_that_throws_releases_the_others) {
  a_rank_that_throws_releases_the_others(2, 4);
}
TEST(GpuRelease, the_same_with_copy_engines) { a_rank_that_throws_releases_the_others(2, 0); }
TEST(GpuRelease, the_same_with_four_ranks) { a_rank_that_throws_releases_the_others(4, 4); }

std::atomic<bool> user_interrupts = false;

TEST(GpuRelease, an_interrupt_ends_the_wait_for_a_call) {
  const InterruptCheck before = set_interrupt_check([] {
    if (user_interrupts) throw Interrupted("interrupted by a test");
  });
  const auto sample = test::sequence_cases(2, 0).at(3);
  const Expected expected(sample);
  std::atomic<int> interrupted = 0;
  Clock::time_point asked;
  const auto body = [&](World& world) {
    Rig rig(world, sample, expected, 4);
    rig.dispatch();
    rig.synchronize();
    if (world.rank() == Rank{1}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      asked = Clock::now();
      user_interrupts = true;
      PollingWait wait(long_timeout_s);
      while (wait.pause()) {
      }
    }
    rig.dispatch();
    try {
      rig.synchronize();
      ADD_FAILURE() << "expected Interrupted";
    } catch (const Interrupted&) {
      EXPECT_LT(seconds_since(asked), 0.5);
      ++interrupted;
    }
    try {
      rig.synchronize();
      ADD_FAILURE() << "expected the dispatcher to be unusable";
    } catch (const Error&) {
    }
    try {
      rig.dispatch();
      ADD_FAILURE() << "expected the dispatcher to be unusable";
    } catch (const TransportError& error) {
      EXPECT_NE(std::string(error.what()).find("unusable after an interrupt"), std::string::npos)
          << error.what();
    }
  };
  EXPECT_THROW(run_gpu_thread_world(2, body, {.timeout_s = long_timeout_s}), Interrupted);
  EXPECT_EQ(interrupted, 1);
  EXPECT_LT(seconds_since(asked), 10.0);
  user_interrupts = false;
  (void)set_interrupt_check(before);
}

TEST(GpuRelease, calls_that_go_well_are_not_cut_short_by_late_ranks) {
  const auto sample = test::sequence_cases(2, 0).at(3);
  const Expected expected(sample);
  run_gpu_thread_world(2, [&](World& world) {
    Rig rig(world, sample, expected, 4);
    for (int call = 0; call < 3; ++call) {
      // Longer than the time after which waits of kernels look whether the rank has given up.
      if (world.rank() == Rank{call % 2}) {
        std::this_thread::sleep_for(std::chrono::milliseconds(400));
      }
      rig.dispatch();
      rig.synchronize();
    }
  });
}

TEST(GpuRelease, a_process_that_gives_up_releases_the_others) {
  const auto sample = test::sequence_cases(2, 0).at(3);
  const Expected expected(sample);
  const auto start = Clock::now();
  const auto ends = test::run_gpu_processes(
      2, [](auto bootstrap, int device) { return make_gpu_process_world(bootstrap, device); },
      [&](World& world) {
        Rig rig(world, sample, expected, 4);
        rig.dispatch();
        rig.synchronize();
        if (world.rank() == Rank{1}) {
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          world.transport().fail("no luck");
          std::this_thread::sleep_for(std::chrono::seconds(2));
          return;
        }
        rig.dispatch();
        rig.synchronize();
      },
      long_timeout_s);
  EXPECT_EQ(ends[0].text, "synchronize: rank 1 failed: no luck");
  EXPECT_EQ(ends[1].text, "");
  EXPECT_LT(seconds_since(start), 40.0);  // starting takes seconds
}

}  // namespace
}  // namespace waybill
