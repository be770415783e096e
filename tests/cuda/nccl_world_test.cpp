// Ranks are processes; those of a node say that they are on a host of their own (NCCL_HOSTID), so
// that NCCL uses its network between nodes, here TCP over the loopback interface. Run them one by
// one (scripts/test_gpu.sh does). WAYBILL_NCCL_LIBRARY names NCCL's library.

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "cuda/gpu_processes.h"
#include "cuda/simulated_hosts.h"
#include "support/expect_error.h"

namespace waybill {
namespace {

using test::at;
using test::ProcessEnd;
using test::SimulatedHosts;

TEST(NcclWorld, ranks_of_other_nodes_have_no_pointers) {
  test::expect_no_errors(test::run_gpu_processes(4, SimulatedHosts{2}, [](World& world) {
    Transport& transport = world.transport();
    SymmetricBuffer buffer = transport.allocate(64, "test");
    SignalPad pad = transport.allocate_signals(4, "test");
    const std::byte* const source = buffer.local;
    for (std::int32_t r = 0; r < 4; ++r) {
      const bool far = r / 2 != to_int(world.rank()) / 2;
      EXPECT_EQ(buffer.peers[at(r)] == nullptr, far);
      if (!far) continue;
      const auto text = concat("rank ", r, " is on another node");
      EXPECT_NE(test::error_of<Unsupported>([&] {
                  transport.put(buffer, {Rank{r}, 0, source, 8});
                }).find(text),
                std::string::npos);
      EXPECT_NE(test::error_of<Unsupported>([&] {
                  transport.signal(Rank{r}, {&pad, 0}, 1);
                }).find(text),
                std::string::npos);
    }
    transport.release(pad);
    transport.release(buffer);
  }));
}

TEST(NcclWorld, one_node_needs_no_nccl) {
  (void)setenv("WAYBILL_NCCL_LIBRARY", "/nowhere.so", 1);
  test::expect_no_errors(test::run_gpu_processes(
      2, SimulatedHosts{2}, [](World& world) { world.barrier(); }));
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
  EXPECT_EQ(ends[1].text.find("starting NCCL: rank 1: NCCL 2."), 0U) << ends[1].text;
  EXPECT_NE(ends[0].text.find("rank "), std::string::npos) << ends[0].text;
  EXPECT_NE(ends[0].text.find("NCCL"), std::string::npos) << ends[0].text;
}

TEST(NcclWorld, a_rank_that_dies_while_nccl_starts_is_reported) {
  const auto ends = test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        if (bootstrap->rank() == Rank{1}) {
          std::thread([] {
            std::this_thread::sleep_for(std::chrono::milliseconds(600));
            (void)std::raise(SIGKILL);
          }).detach();
          (void)setenv("NCCL_SOCKET_IFNAME", "=nosuch", 1);
        }
        return SimulatedHosts{1}(std::move(bootstrap), device);
      },
      [](World&) {}, 5);
  EXPECT_NE(ends[0].text, "");
}

TEST(NcclWorld, wires_must_be_the_same) {
  const auto ends = test::run_gpu_processes(
      2,
      [](std::shared_ptr<Bootstrap> bootstrap, int device) {
        const bool peer = bootstrap->rank() == Rank{1};
        return make_gpu_process_world(std::move(bootstrap), device, 1,
                                      peer ? NetworkWire::peer : NetworkWire::nccl);
      },
      [](World&) {});
  for (const ProcessEnd& end : ends) {
    EXPECT_NE(end.text.find("make_gpu_process_world: rank 1 with wire = peer"), std::string::npos)
        << end.text;
  }
}

}  // namespace
}  // namespace waybill
