#include <gtest/gtest.h>

#include <cstring>

#include "support/expect_error.h"
#include "support/run_ranks.h"
#include "support/transport_checks.h"
#include "transport/transport.h"

namespace waybill {
namespace {

using test::expect_no_errors;
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
    EXPECT_NE(result.text.find("share_memory(landing): size = "), std::string::npos) << result.text;
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

}  // namespace
}  // namespace waybill
