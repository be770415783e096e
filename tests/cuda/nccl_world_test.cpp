// Ranks are processes; nodes are simulated hosts, between which NCCL goes over TCP. Run them one by
// one (scripts/test_gpu.sh does, and finds NCCL).

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "cuda/gpu_processes.h"
#include "cuda/simulated_hosts.h"
#include "transport/transport.h"

namespace waybill {
namespace {

using test::ProcessEnd;
using test::SimulatedHosts;
using test::to_size;

/// The text of the Unsupported that a call throws.
template <class Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const Unsupported& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(NcclWorld, ranks_of_other_nodes_have_no_pointers) {
  test::expect_no_errors(test::run_gpu_processes(4, SimulatedHosts{2}, [](World& world) {
    Transport& transport = world.transport();
    SymmetricBuffer buffer = transport.allocate(64, "test");
    SignalPad pad = transport.allocate_signals(4, "test");
    for (std::int32_t r = 0; r < 4; ++r) {
      const bool far = r / 2 != to_int(world.rank()) / 2;
      EXPECT_EQ(buffer.peers[r] == nullptr, far);
      EXPECT_EQ(buffer.memory[r] == nullptr, far);
      if (!far) continue;
      const std::string text = concat("rank ", r, " is on another node");
      const auto put = [&] { transport.put(buffer, {Rank{r}, 0, buffer.local, 8}); };
      const auto signal = [&] { transport.signal(Rank{r}, {&pad, 0}, 1); };
      EXPECT_NE(refusal_of(put).find(text), std::string::npos) << refusal_of(put);
      EXPECT_NE(refusal_of(signal).find(text), std::string::npos) << refusal_of(signal);
    }
    transport.release(pad);
    transport.release(buffer);
  }));
}

TEST(NcclWorld, one_node_needs_no_nccl) {
  (void)setenv("WAYBILL_NCCL_LIBRARY", "/nowhere.so", 1);
  test::expect_no_errors(
      test::run_gpu_processes(2, SimulatedHosts{2}, [](World& world) { world.barrier(); }));
}

TEST(NcclWorld, a_missing_library_is_explained_on_all_ranks) {
  const auto ends = test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        if (bootstrap->rank() == Rank{0}) (void)setenv("WAYBILL_NCCL_LIBRARY", "/nowhere.so", 1);
        return SimulatedHosts{1}(std::move(bootstrap), device);
      },
      [](World&) {});
  for (const ProcessEnd& end : ends) {
    EXPECT_NE(end.text.find("NCCL cannot be used"), std::string::npos) << end.text;
    EXPECT_NE(end.text.find("/nowhere.so: cannot open"), std::string::npos) << end.text;
    EXPECT_NE(end.text.find("WAYBILL_NCCL_LIBRARY"), std::string::npos) << end.text;
  }
}

TEST(NcclWorld, what_nccl_says_at_the_start_is_said_by_all_ranks) {
  const auto ends = test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        if (bootstrap->rank() == Rank{1}) (void)setenv("NCCL_SOCKET_IFNAME", "=nosuch", 1);
        return SimulatedHosts{1}(std::move(bootstrap), device);
      },
      [](World&) {});
  for (const ProcessEnd& end : ends)
    EXPECT_NE(end.text.find("rank 1: NCCL 2."), std::string::npos) << end.text;
}

TEST(NcclWorld, a_rank_that_dies_while_nccl_starts_ends_the_start_of_the_others) {
  const auto ends = test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        if (bootstrap->rank() == Rank{1}) {
          std::thread([] {
            std::this_thread::sleep_for(std::chrono::milliseconds(500));
            (void)std::raise(SIGKILL);
          }).detach();
        }
        World world = SimulatedHosts{1}(bootstrap, device);
        if (bootstrap->rank() == Rank{1}) std::this_thread::sleep_for(std::chrono::seconds(5));
        world.barrier();
        return world;
      },
      [](World&) {}, 4);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  EXPECT_NE(ends[0].text, "");
  EXPECT_EQ(ends[0].text.find("still running"), std::string::npos) << ends[0].text;
}

TEST(NcclWorld, all_ranks_take_the_same_wire) {
  const auto ends = test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        const bool peer = bootstrap->rank() == Rank{1};
        return make_gpu_process_world(std::move(bootstrap), device, 1,
                                      peer ? NetworkBackend::peer : NetworkBackend::nccl);
      },
      [](World&) {});
  for (const ProcessEnd& end : ends) {
    EXPECT_NE(end.text.find("make_gpu_process_world: rank 1 with wire = peer, the others nccl"),
              std::string::npos)
        << end.text;
  }
}

}  // namespace
}  // namespace waybill
