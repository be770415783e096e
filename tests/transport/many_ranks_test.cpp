// Rendezvous of more ranks than 64, and processes of one host that share memory.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "support/rendezvous.h"
#include "support/run_processes.h"
#include "support/run_ranks.h"
#include "support/sanitizers.h"
#include "transport/transport.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

/// Descriptors for both ends of all connections, as all ranks are in this process.
void raise_descriptor_limit() {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_GE(limit.rlim_max, 4096U) << "ulimit -Hn";
}

void exchange(Bootstrap& bootstrap) {
  const std::int32_t me = to_int(bootstrap.rank());
  for (const std::int32_t factor : {3, 7}) {
    const auto all = all_gather_value(bootstrap, me * factor, "exchange");
    for (std::size_t r = 0; r < all.size(); ++r)
      ASSERT_EQ(all[r], static_cast<std::int32_t>(r) * factor);
  }
  ASSERT_TRUE(on_one_host(bootstrap));
}

class ManyRanksMeet : public testing::TestWithParam<std::int32_t> {};

TEST_P(ManyRanksMeet, over_tcp) {
  raise_descriptor_limit();
  const std::int32_t world_size = GetParam();
  const std::uint16_t port = test::free_port();
  test::expect_no_errors(test::run_ranks(world_size, [&](std::int32_t rank) {
    exchange(*make_tcp_bootstrap(rank, world_size, "127.0.0.1", port, 30));
  }));
}

TEST_P(ManyRanksMeet, in_a_folder) {
  raise_descriptor_limit();
  const std::int32_t world_size = std::min(GetParam(), 128);  // files take their time
  const test::MeetingFolder folder;
  test::expect_no_errors(test::run_ranks(world_size, [&](std::int32_t rank) {
    exchange(*make_file_bootstrap(rank, world_size, folder.path(), 30));
  }));
}

INSTANTIATE_TEST_SUITE_P(Worlds, ManyRanksMeet, testing::Values(72, 256));

#ifndef WAYBILL_TEST_SLOW
TEST(ManyRanks, a_thousand_meet_over_tcp) {
  raise_descriptor_limit();
  const std::uint16_t port = test::free_port();
  test::expect_no_errors(test::run_ranks(1024, [&](std::int32_t rank) {
    const auto bootstrap = make_tcp_bootstrap(rank, 1024, "127.0.0.1", port, 60);
    const auto all = all_gather_value(*bootstrap, rank, "exchange");
    for (std::size_t r = 0; r < all.size(); ++r) ASSERT_EQ(all[r], static_cast<std::int32_t>(r));
  }));
}
#endif

TEST(ManyRanks, processes_share_memory) {
  constexpr std::int32_t world_size = 72;
  const test::MeetingFolder folder;
  test::expect_no_errors(test::run_processes(world_size, [&](std::int32_t rank) {
    const auto transport =
        make_process_transport(make_file_bootstrap(rank, world_size, folder.path(), 30));
    SymmetricBuffer buffer = transport->allocate(4 * world_size, "many");
    SignalPad pad = transport->allocate_signals(world_size, "many");
    for (std::int32_t r = 0; r < world_size; ++r) {
      transport->put_signal(buffer,
                            {Rank{r}, 4 * rank, reinterpret_cast<const std::byte*>(&rank), 4},
                            {&pad, rank}, 1);
    }
    for (std::int32_t r = 0; r < world_size; ++r) {
      (void)transport->wait({&pad, r}, 1, Rank{r}, "many");
      require(reinterpret_cast<const std::int32_t*>(buffer.local)[r] == r, "row of rank ", r);
    }
    transport->release(buffer);
    transport->release(pad);
  }));
}

/// What makes parts of a machine hosts of their own, for tests of several hosts.
TEST(HostId, can_be_set) {
  const std::string usual = host_id();
  EXPECT_FALSE(usual.empty());
  const test::MeetingFolder folder;
  test::expect_no_errors(test::run_processes(2, [&](std::int32_t rank) {
    const char* const mine = rank == 0 ? "east" : "west";
    (void)setenv("WAYBILL_HOST_ID", mine, 1);
    require(host_id() == mine, "host_id() = ", host_id());
    const auto bootstrap = make_file_bootstrap(rank, 2, folder.path(), 20);
    require(!on_one_host(*bootstrap), "both on one host");
  }));
  EXPECT_EQ(host_id(), usual);
}

}  // namespace
}  // namespace waybill
