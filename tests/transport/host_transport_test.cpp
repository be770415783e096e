// The engines in host memory: ranks that are threads, and ranks that are processes.

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>

#include "support/expect_error.h"
#include "support/run_processes.h"
#include "support/run_ranks.h"
#include "support/transport_checks.h"
#include "transport/transport.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

using test::expect_no_errors;
using test::MeetingFolder;
using test::ProcessEnd;
using test::run_with_bootstrap;
using test::timeout_of;

TEST(ThreadTransport, PutsAndSignalsReachEveryPeer) {
  for (const std::int32_t per_node : {0, 2, 1}) {
    expect_no_errors(run_with_bootstrap(4, 20, [&](std::shared_ptr<Bootstrap> bootstrap) {
      test::check_puts_and_signals(*make_thread_transport(std::move(bootstrap), per_node));
    }));
  }
}

TEST(ThreadTransport, ReachFollowsTheNodes) {
  expect_no_errors(run_with_bootstrap(4, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    test::check_reach(*make_thread_transport(std::move(bootstrap), 2));
  }));
}

TEST(ThreadTransport, ASilentPeerIsNamedWithAllThatIsKnown) {
  const auto results = run_with_bootstrap(4, 0.3, [](std::shared_ptr<Bootstrap> bootstrap) {
    test::miss_rank_3(*make_thread_transport(std::move(bootstrap), 2));
  });
  for (std::int32_t r = 0; r < 4; ++r) {
    const TimeoutInfo missed = timeout_of(results[r]);
    EXPECT_EQ(missed.operation, "unload");
    EXPECT_EQ(missed.rank, r);
    EXPECT_EQ(missed.peer, 3);
    EXPECT_EQ(missed.wanted, 2U);
    EXPECT_EQ(missed.seen, 1U);
    EXPECT_GE(missed.seconds, 0.3);
    EXPECT_NE(results[r].text.find("for signal >= 2 from rank 3 (node 1, local_rank 1)"),
              std::string::npos)
        << results[r].text;
  }
}

TEST(ThreadTransport, MemoryOutlivesARankThatLeaves) {
  expect_no_errors(run_with_bootstrap(2, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    SymmetricBuffer buffer;
    {
      const auto transport = make_thread_transport(bootstrap);
      buffer = transport->allocate(1 << 20, "test");
    }
    if (bootstrap->rank() == Rank{0}) buffer = {};  // its own part stays while rank 1 has it
    bootstrap->barrier("left");
    if (bootstrap->rank() == Rank{1}) std::memset(buffer.peers[0], 7, 1 << 20);
  }));
}

TEST(ThreadTransport, SizesThatDifferAreRefusedByAll) {
  const auto results = run_with_bootstrap(3, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto transport = make_thread_transport(std::move(bootstrap));
    (void)transport->allocate(to_int(transport->rank()) == 1 ? 16 : 32, "landing");
  });
  for (const auto& result : results) {
    EXPECT_NE(result.text.find("share_memory(landing): size_bytes = "), std::string::npos)
        << result.text;
  }
}

TEST(ThreadTransport, RejectsWhatDoesNotFit) {
  expect_no_errors(run_with_bootstrap(1, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto transport = make_thread_transport(std::move(bootstrap));
    const SymmetricBuffer buffer = transport->allocate(8, "test");
    const SignalPad pad = transport->allocate_signals(1, "test");
    const std::byte byte{};
    const auto rejects = [](const auto& call, std::string_view part) {
      EXPECT_TRUE(test::rejects(call, {part}));
    };
    rejects([&] { transport->put(buffer, {Rank{0}, 8, &byte, 1}); }, "8 + 1");
    rejects([&] { transport->put(buffer, {Rank{0}, -1, &byte, 1}); }, "-1 + 1");
    rejects([&] { transport->put(buffer, {Rank{1}, 0, &byte, 1}); }, "peer = 1");
    rejects([&] { transport->put(buffer, {Rank{0}, 0, nullptr, 1}); }, "source is null");
    rejects([&] { transport->signal(Rank{0}, {&pad, 1}, 1); }, "idx = 1");
    rejects([&] { transport->signal(Rank{2}, {&pad, 0}, 1); }, "peer = 2");
    rejects([&] { (void)transport->allocate(-1, "test"); }, "size_bytes = -1");
    rejects([&] { (void)transport->reach(Rank{1}); }, "peer = 1");
  }));
}

/// Runs body(bootstrap) in one process per rank.
std::vector<ProcessEnd> run_with_files(
    std::int32_t world_size, double timeout_s,
    const std::function<void(std::shared_ptr<Bootstrap>)>& body) {
  const MeetingFolder folder;
  return test::run_processes(world_size, [&](std::int32_t rank) {
    body(make_file_bootstrap(rank, world_size, folder.path(), timeout_s));
  });
}

/// Shared memory that still has a name.
std::vector<std::string> names_of(const std::vector<ProcessEnd>& ends) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    for (const ProcessEnd& end : ends) {
      if (name.starts_with(concat("waybill-", end.process, "-"))) names.push_back(name);
    }
  }
  return names;
}

TEST(ProcessTransport, PutsAndSignalsReachEveryPeer) {
  for (const std::int32_t per_node : {0, 2, 1}) {
    const auto ends = run_with_files(4, 20, [&](std::shared_ptr<Bootstrap> bootstrap) {
      test::check_puts_and_signals(*make_process_transport(std::move(bootstrap), per_node));
    });
    expect_no_errors(ends);
    EXPECT_EQ(names_of(ends), std::vector<std::string>{});
  }
}

TEST(ProcessTransport, ReachFollowsTheNodes) {
  expect_no_errors(run_with_files(4, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    test::check_reach(*make_process_transport(std::move(bootstrap), 2));
  }));
}

TEST(ProcessTransport, ASilentPeerIsNamedWithAllThatIsKnown) {
  const auto ends = run_with_files(4, 0.5, [](std::shared_ptr<Bootstrap> bootstrap) {
    test::miss_rank_3(*make_process_transport(std::move(bootstrap), 2));
  });
  for (std::int32_t r = 0; r < 4; ++r) {
    const std::string& text = ends[r].text;
    EXPECT_TRUE(test::names_timeout(
        text, {.operation = "unload", .rank = r, .peer = 3, .wanted = 2, .seen = 1}, 0.5, 5));
    EXPECT_NE(text.find("from rank 3 (node 1, local_rank 1)"), std::string::npos) << text;
  }
}

TEST(ProcessTransport, AKilledRankIsNamedAndLeavesNothing) {
  const auto start = std::chrono::steady_clock::now();
  const auto ends = run_with_files(3, 60, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto transport = make_process_transport(std::move(bootstrap));
    const SymmetricBuffer buffer = transport->allocate(1 << 20, "test");
    const SignalPad pad = transport->allocate_signals(3, "test");
    if (transport->rank() == Rank{1}) (void)std::raise(SIGKILL);
    std::memset(buffer.peers[1], 7, 1 << 20);  // what it had stays while others have it
    EXPECT_EQ(buffer.peers[1][(1 << 20) - 1], std::byte{7});
    (void)transport->wait({&pad, 1}, 5, Rank{1}, "unload");
  });
  EXPECT_EQ(ends[1].signal, SIGKILL);
  for (const std::int32_t r : {0, 2}) {
    EXPECT_EQ(ends[r].text, concat("unload: rank 1 is gone: the end of process ", ends[1].process));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_EQ(names_of(ends), std::vector<std::string>{});
}

TEST(ProcessTransport, ARankKilledBeforeAnAllocationIsNamedAndLeavesNothing) {
  const auto start = std::chrono::steady_clock::now();
  const auto ends = run_with_files(3, 60, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto transport = make_process_transport(bootstrap);
    if (transport->rank() == Rank{2}) (void)std::raise(SIGKILL);
    (void)transport->allocate(1 << 20, "landing");
  });
  for (const std::int32_t r : {0, 1}) {
    EXPECT_EQ(ends[r].text,
              concat("allocate(landing): rank 2 is gone: the end of process ", ends[2].process));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
  EXPECT_EQ(names_of(ends), std::vector<std::string>{});
}

TEST(ProcessTransport, ARankThatLeftIsNamedByWhoWaitsForIt) {
  const auto ends = run_with_files(2, 60, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto transport = make_process_transport(bootstrap);
    const SignalPad pad = transport->allocate_signals(1, "test");
    if (transport->rank() == Rank{1}) {
      transport->signal(Rank{0}, {&pad, 0}, 1);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has left
    EXPECT_EQ(transport->wait({&pad, 0}, 1, Rank{1}, "unload"), 1U);
    (void)transport->wait({&pad, 0}, 2, Rank{1}, "unload");
  });
  EXPECT_EQ(ends[1].text, "");
  EXPECT_EQ(ends[0].text,
            concat("unload: rank 1 is gone: it has left the world of process ", ends[1].process));
}

TEST(ProcessTransport, ARankThatGivesUpSaysWhy) {
  const auto ends = run_with_files(3, 60, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto transport = make_process_transport(bootstrap);
    const SignalPad pad = transport->allocate_signals(1, "test");
    if (transport->rank() == Rank{1}) {
      transport->fail("no luck\x1b[31m");
      EXPECT_THROW(transport->barrier("later"), TransportError);
      std::this_thread::sleep_for(std::chrono::milliseconds(500));  // it need not end for that
      return;
    }
    if (transport->rank() == Rank{0}) transport->barrier("meeting");
    (void)transport->wait({&pad, 0}, 2, Rank{0}, "unload");
  });
  EXPECT_EQ(ends[0].text, "meeting: rank 1 failed: no luck [31m");
  EXPECT_EQ(ends[2].text, "unload: rank 1 failed: no luck [31m");
}

TEST(ProcessTransport, SizesThatDifferAreRefusedByAll) {
  const auto ends = run_with_files(3, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto transport = make_process_transport(std::move(bootstrap));
    (void)transport->allocate(transport->rank() == Rank{1} ? 16 : 32, "landing");
  });
  for (const ProcessEnd& end : ends) {
    EXPECT_NE(end.text.find("allocate(landing): size_bytes = "), std::string::npos) << end.text;
  }
}

TEST(ProcessTransport, MoreThanTheHostHasIsRefusedByAll) {
  const auto ends = run_with_files(2, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto transport = make_process_transport(std::move(bootstrap));
    EXPECT_THROW((void)transport->allocate(std::int64_t{1} << 60, "landing"), TransportError);
    SymmetricBuffer small = transport->allocate(8, "small");  // all are still at the same call
    transport->release(small);
    (void)transport->allocate(std::int64_t{1} << 60, "landing");
  });
  for (const ProcessEnd& end : ends) {
    EXPECT_NE(end.text.find("cannot reserve 1152921504606846976 bytes of shared memory"),
              std::string::npos)
        << end.text;
  }
  EXPECT_EQ(names_of(ends), std::vector<std::string>{});
}

TEST(Agree, TroubleOnOneRankIsAnErrorOnAll) {
  const auto ends = run_with_files(3, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    EXPECT_TRUE(on_one_host(*bootstrap));
    require_one_host(*bootstrap, "test");
    int calls = 0;
    run_collectively(*bootstrap, "test", [&] { ++calls; });
    EXPECT_EQ(calls, 1);
    run_collectively(*bootstrap, "opening", [&] {
      if (bootstrap->rank() == Rank{1}) throw InvalidArgument("the door is shut");
    });
  });
  EXPECT_EQ(ends[1].text, "the door is shut");
  for (const std::int32_t r : {0, 2}) {
    EXPECT_EQ(ends[r].text, "opening: rank 1 failed: the door is shut");
  }
}

}  // namespace
}  // namespace waybill
