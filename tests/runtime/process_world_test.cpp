#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include "support/node_case.h"
#include "support/run_processes.h"
#include "support/sequence_step.h"
#include "support/transport_checks.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

using test::Expected;
using test::ProcessEnd;
using test::SequenceCase;
using test::to_size;

std::vector<ProcessEnd> run_process_world(std::int32_t world_size, double timeout_s,
                                          const std::function<void(World&)>& body,
                                          std::int32_t ranks_per_node = 0) {
  const test::MeetingFolder folder;
  return test::run_processes(world_size, [&](std::int32_t rank) {
    World world = make_process_world(
        make_file_bootstrap(rank, world_size, folder.path(), timeout_s), ranks_per_node);
    body(world);
  });
}

TEST(ProcessWorld, equals_the_simulation) {
  for (const std::int32_t world_size : {1, 2, 5}) {
    const auto cases = test::sequence_cases(world_size, 12);
    std::vector<Expected> expected;
    for (const SequenceCase& sample : cases) expected.emplace_back(sample);
    test::expect_no_errors(run_process_world(world_size, 20, [&](World& world) {
      SequenceDispatcher dispatcher(world);
      for (std::size_t i = 0; i < cases.size(); ++i) {
        test::check_step(world, dispatcher, cases[i], expected[i]);
      }
      dispatcher.close();
    }));
  }
}

TEST(ProcessWorld, nodes_and_relays_equal_the_simulation) {
  for (const Topology topology : {Topology{4, 2}, Topology{4, 4}}) {
    const auto cases = test::node_cases(topology, 8);
    const auto body = [&](World& world) {
      SequenceDispatcher dispatcher(world, test::eager_options());
      for (const auto& node : cases) test::check_step(world, dispatcher, *node);
      dispatcher.close();
    };
    test::expect_no_errors(run_process_world(4, 20, body, topology.ranks_per_node));
  }
}

TEST(ProcessWorld, calls_follow_each_other_with_late_ranks) {
  const auto cases = test::sequence_cases(3, 8);
  std::vector<Expected> expected;
  for (std::size_t i = 0; i < cases.size(); ++i) expected.emplace_back(cases[i], 100 * i);
  test::expect_no_errors(run_process_world(3, 20, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    Random random(to_int(world.rank()));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
      test::check_step(world, dispatcher, cases[i], expected[i]);
    }
  }));
}

void kill_this_process(int /*signal*/) { (void)::kill(getpid(), SIGKILL); }

/// A copy of `tensor` whose last page kills the process when it is read: in the middle of the rows.
class DeadlyRows {
 public:
  explicit DeadlyRows(const HostTensor& tensor) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    size_ = (static_cast<std::size_t>(tensor.size_bytes()) / page + 2) * page;
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    // The last half of the rows lies in the page that cannot be read.
    const auto half = static_cast<std::size_t>(tensor.size_bytes()) / 2;
    std::byte* const begin = memory_ + size_ - page - half;
    std::memcpy(begin, tensor.bytes().data(), half);
    view_ = tensor.view();
    view_.data = begin;
    (void)mprotect(memory_ + size_ - page, page, PROT_NONE);
    (void)std::signal(SIGSEGV, kill_this_process);
  }
  DeadlyRows(const DeadlyRows&) = delete;
  DeadlyRows& operator=(const DeadlyRows&) = delete;
  ~DeadlyRows() { (void)munmap(memory_, size_); }
  [[nodiscard]] const ConstTensorView& view() const { return view_; }

 private:
  std::byte* memory_;
  std::size_t size_;
  ConstTensorView view_;
};

TEST(ProcessWorld, a_rank_killed_in_the_middle_of_a_call_is_named_by_all_others) {
  const auto sample = test::sequence_cases(4, 0).at(3);  // many copies: every rank sends to all
  const Expected expected(sample);
  const auto start = std::chrono::steady_clock::now();
  const auto ends = run_process_world(4, 60, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    const std::size_t r = to_int(world.rank());
    const auto plan = dispatcher.plan_dispatch(test::forward_parts(sample));
    const DeadlyRows deadly(expected.k[r]);
    for (int call = 1; call <= 3; ++call) {
      const bool dies = call == 3 && world.rank() == Rank{1};
      const std::vector<ConstTensorView> inputs{
          expected.q[r].view(), dies ? deadly.view() : expected.k[r].view(), expected.v[r].view()};
      try {
        (void)dispatcher.dispatch(plan, inputs);
      } catch (const PeerFailed& error) {
        try {
          (void)dispatcher.dispatch(plan, inputs);
          ADD_FAILURE() << "expected the dispatcher to be unusable";
        } catch (const TransportError& again) {
          EXPECT_EQ(again.what(),
                    concat("dispatch: the dispatcher is unusable after a failure: ", error.what()));
        }
        throw;
      }
    }
  });
  EXPECT_EQ(ends[1].signal, SIGKILL);
  for (const std::int32_t r : {0, 2, 3}) {
    const std::string& text = ends[r].text;
    EXPECT_NE(text.find(concat("dispatch: rank 1 is gone: the end of process ", ends[1].process)),
              std::string::npos)
        << text;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
}

TEST(ProcessWorld, a_rank_killed_at_any_time_ends_the_calls_of_all_others) {
  const auto sample = test::sequence_cases(3, 0).at(3);
  const Expected expected(sample);
  const auto ends = run_process_world(3, 60, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    const std::size_t r = to_int(world.rank());
    const auto plan = dispatcher.plan_dispatch(test::forward_parts(sample));
    const std::vector<ConstTensorView> inputs{expected.q[r].view(), expected.k[r].view(),
                                              expected.v[r].view()};
    std::jthread killer;
    if (world.rank() == Rank{2}) {
      killer = std::jthread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        (void)::kill(getpid(), SIGKILL);
      });
    }
    for (;;) (void)dispatcher.dispatch(plan, inputs);
  });
  EXPECT_EQ(ends[2].signal, SIGKILL);
  // Who waits for the other one, that has stopped for rank 2, hears of it from there.
  for (const std::int32_t r : {0, 1}) {
    const std::string& text = ends[r].text;
    EXPECT_TRUE(text.starts_with("dispatch: rank ") ||
                text.starts_with("allocate(window of dispatcher 1): rank "))
        << text;
    EXPECT_NE(text.find("rank 2 is gone: the end of process"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace waybill
