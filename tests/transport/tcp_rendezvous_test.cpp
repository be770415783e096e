// Who may call rank 0 and what becomes of it, over real sockets.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <latch>

#include "support/expect_error.h"
#include "support/rendezvous.h"
#include "support/run_processes.h"
#include "support/run_ranks.h"
#include "support/sanitizers.h"
#include "transport/bootstrap/tcp/handshake.h"
#include "transport/bootstrap/tcp/rendezvous.h"

namespace waybill {
namespace {

using test::encode;
using test::error_of;
using test::expect_no_errors;
using test::free_port;
using test::holds;
using test::RawCaller;
using test::Stopwatch;

void meet(std::int32_t rank, std::int32_t world_size, std::uint16_t port,
          const JobIdentity& job = {}, double timeout_s = 20) {
  const auto bootstrap = make_tcp_bootstrap(rank, world_size, "127.0.0.1", port, timeout_s, job);
  const auto ranks = all_gather_value(*bootstrap, rank, "meet");
  for (std::int32_t r = 0; r < world_size; ++r) ASSERT_EQ(ranks[static_cast<std::size_t>(r)], r);
  bootstrap->barrier("end");
}

/// Rank 0 waits, `stranger` does what it does, and then comes rank 1: a healthy job of two.
/// @return what was written on stderr
std::string meet_beside(const std::function<void(std::uint16_t port)>& stranger,
                        const JobIdentity& job = {}) {
  testing::internal::CaptureStderr();
  const std::uint16_t port = free_port();
  std::latch stranger_is_done(1);
  expect_no_errors(test::run_ranks(3, [&](std::int32_t i) {
    if (i < 2) {
      if (i == 1) stranger_is_done.wait();
      return meet(i, 2, port, job);
    }
    stranger(port);
    stranger_is_done.count_down();
  }));
  return testing::internal::GetCapturedStderr();
}

std::int64_t num_lines(const std::string& text) { return std::ranges::count(text, '\n'); }

/// A rank that is refused gets the reason at once, and so does the log; the job goes on.
void expect_refused(std::int32_t rank, std::int32_t world_size, const JobIdentity& its,
                    const JobIdentity& job, std::string_view reason) {
  std::string error;
  const Stopwatch watch;
  const std::string log = meet_beside(
      [&](std::uint16_t port) { error = error_of([&] { meet(rank, world_size, port, its); }); },
      job);
  EXPECT_LT(watch.seconds(), 5);
  EXPECT_TRUE(holds(error, concat("refused rank ", rank, ": ", reason)));
  EXPECT_TRUE(holds(log, "waybill: rank 0 hung up on 127.0.0.1:"));
  EXPECT_TRUE(holds(log, reason));
  EXPECT_EQ(num_lines(log), 1) << log;
}

TEST(TcpRendezvous, ARankOfAnotherWorldIsRefused) {
  expect_refused(1, 3, {}, {}, "world_size = 3, expected 2");
  expect_refused(4, 5, {}, {}, "world_size = 5, expected 2");
}

TEST(TcpRendezvous, ASecondRankOfOneNumberIsRefused) {
  testing::internal::CaptureStderr();
  const std::uint16_t port = free_port();
  std::latch refused(1);
  std::atomic<int> num_refused = 0;
  const auto results = test::run_ranks(4, [&](std::int32_t i) {
    const std::int32_t rank = i == 3 ? 1 : i;  // one of the two is too late, whichever it is
    if (rank == 2) refused.wait();
    const std::string error = error_of([&] { meet(rank, 3, port); });
    if (error.empty()) return;
    ++num_refused;
    EXPECT_TRUE(holds(error, "refused rank 1: rank 1 connected twice"));
    refused.count_down();
  });
  EXPECT_EQ(num_refused, 1);
  EXPECT_EQ(num_lines(testing::internal::GetCapturedStderr()), 1);
}

TEST(TcpRendezvous, JobsWithOtherIdsDoNotMix) {
  expect_refused(1, 2, {.id = "b", .secret = {}}, {.id = "a", .secret = {}},
                 "job id = \"b\", expected \"a\"");
  expect_refused(1, 2, {}, {.id = "a", .secret = {}}, "job id = none, expected \"a\"");
  expect_refused(1, 2, {.id = "b", .secret = {}}, {}, "job id = \"b\", expected none");
  const std::string long_id(120, 'x');
  expect_refused(1, 2, {.id = long_id.substr(1), .secret = {}}, {.id = long_id, .secret = {}},
                 "job id = \"xxx");
}

TEST(TcpRendezvous, APortThatIsInUseIsSaid) {
  const std::uint16_t port = free_port();
  const int other = socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = test::loopback(port);
  ASSERT_EQ(bind(other, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(other, 1), 0);
  EXPECT_TRUE(holds(error_of([&] { meet(0, 2, port, {}, 0.2); }),
                    "Address already in use; expected a port that no other job uses"));
  // Who holds it for a moment only is waited for.
  std::jthread rank_1([&] { meet(1, 2, port); });
  std::jthread closes([&] {
    test::sleep_s(0.2);
    close(other);
  });
  meet(0, 2, port);
}

TEST(TcpRendezvous, ASecretIsProvedByBothSides) {
  const JobIdentity job{.id = "a", .secret = "correct horse"};
  const std::uint16_t port = free_port();
  expect_no_errors(test::run_ranks(4, [&](std::int32_t rank) { meet(rank, 4, port, job); }));
  expect_refused(1, 2, {.id = "a", .secret = {}}, job, "no secret, expected that of rank 0");
  expect_refused(1, 2, {.id = "a", .secret = "battery"}, job,
                 "WAYBILL_RENDEZVOUS_SECRET differs from that of rank 0");
  expect_refused(1, 2, job, {.id = "a", .secret = {}}, "a secret, expected none");
  // Who has not proved the secret is not told which job this is.
  expect_refused(1, 2, {.id = "b", .secret = "battery"}, job, "WAYBILL_RENDEZVOUS_SECRET differs");
  expect_refused(1, 2, {.id = "b", .secret = job.secret}, job, "job id = \"b\", expected \"a\"");
}

TEST(TcpRendezvous, GarbageIsHungUpOnWithOneLine) {
  for (const std::string_view garbage :
       {std::string_view("GET / HTTP/1.1\r\n\r\n"), std::string_view("\x16\x03\x01\x02"),
        std::string_view("1llibyaw\0\0\0\0", 12), std::string_view("w\x1b[2J")}) {
    const std::string log = meet_beside([&](std::uint16_t port) {
      const RawCaller stranger(port);
      stranger.say(garbage);
      EXPECT_EQ(stranger.hear(4), "");
    });
    EXPECT_TRUE(holds(log, "it is no rank of Waybill"));
    EXPECT_EQ(num_lines(log), 1) << log;
  }
}

TEST(TcpRendezvous, AnotherReleaseGetsTheReason) {
  const std::string log = meet_beside([&](std::uint16_t port) {
    auto hello = encode(detail::Hello{.world_size = 2, .rank = 1});
    hello[8] = std::byte{77};
    const RawCaller stranger(port);
    stranger.say(hello.data(), 16);  // its hello may be of another size
    EXPECT_TRUE(holds(stranger.hear(4), "version of the rendezvous = 77, expected 3"));
  });
  EXPECT_TRUE(holds(log, "version of the rendezvous = 77"));
}

TEST(TcpRendezvous, AnIdThatATerminalWouldActOnIsNotPrinted) {
  const std::string log = meet_beside([&](std::uint16_t port) {
    (void)error_of([&] { meet(1, 2, port, {.id = "\x1b[31m\n\xc2\x9b", .secret = {}}); });
  });
  EXPECT_TRUE(holds(log, "job id = \" [31m   \""));
}

TEST(TcpRendezvous, IdleStrangersChangeNothing) {
  const std::uint16_t port = free_port();
  int strangers_are_there[2];
  int go_home[2];
  ASSERT_EQ(pipe(strangers_are_there) + pipe(go_home), 0);
  const pid_t strangers = fork();
  if (strangers == 0) {
    rlimit limit{};
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 1024);
    (void)setrlimit(RLIMIT_NOFILE, &limit);
    std::vector<RawCaller> callers;
    for (int i = 0; i < 900; ++i) callers.emplace_back(port);
    char byte = 1;
    (void)!write(strangers_are_there[1], &byte, 1);
    (void)!read(go_home[0], &byte, 1);
    _exit(0);
  }
  testing::internal::CaptureStderr();
  double seconds = 0;
  expect_no_errors(test::run_ranks(3, [&](std::int32_t rank) {
    if (rank > 0) {
      char byte = 0;
      if (rank == 1) (void)!read(strangers_are_there[0], &byte, 1);
      if (rank == 2) test::sleep_s(0.2);
    }
    const Stopwatch watch;
    meet(rank, 3, port);
    if (rank == 1) seconds = watch.seconds();
  }));
  EXPECT_LT(seconds, 3);
  EXPECT_LE(num_lines(testing::internal::GetCapturedStderr()), 22);
  (void)!write(go_home[1], "x", 1);
  int status = 0;
  ASSERT_EQ(waitpid(strangers, &status, 0), strangers);
  for (const int end : {strangers_are_there[0], strangers_are_there[1], go_home[0], go_home[1]})
    close(end);
}

TEST(TcpRendezvous, StrangersDoNotMoveTheDeadline) {
  testing::internal::CaptureStderr();
  const std::uint16_t port = free_port();
  std::atomic<bool> done = false;
  const auto results = test::run_ranks(2, [&](std::int32_t i) {
    if (i == 0) {
      const Stopwatch watch;
      const std::string error = error_of([&] { meet(0, 2, port, {}, 1.0); });
      done = true;
      EXPECT_TRUE(holds(error, "from rank 1"));
      EXPECT_GE(watch.seconds(), 0.9);
      EXPECT_LT(watch.seconds(), 1.6);
      return;
    }
    std::vector<RawCaller> callers;
    for (callers.emplace_back(port); !done; test::sleep_s(0.1)) {
      if (callers.size() < 8) callers.emplace_back(port);
      callers[callers.size() / 2].say("wayb");  // some begin to speak
    }
  });
  (void)testing::internal::GetCapturedStderr();
}

/// In a process that may have only so many descriptors.
test::ProcessEnd run_with_descriptors(rlim_t most, const std::function<void()>& body) {
  return test::run_processes(1, [&](std::int32_t) {
    const rlimit limit{.rlim_cur = most, .rlim_max = most};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("setrlimit failed");
    body();
  })[0];
}

TEST(TcpRendezvous, UnknownCallersLeaveDescriptorsForTheRanks) {
  const std::uint16_t port = free_port();
  const pid_t strangers = fork();
  if (strangers == 0) {
    std::vector<RawCaller> callers;
    for (int i = 0; i < 300; ++i) callers.emplace_back(port);
    for (std::int32_t rank = 1; rank < 8; ++rank) callers.emplace_back(port);
    test::expect_no_errors(test::run_ranks(7, [&](std::int32_t i) { meet(i + 1, 8, port); }));
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  const auto end = run_with_descriptors(48, [&] {
    (void)freopen("/dev/null", "w", stderr);
    meet(0, 8, port);
  });
  EXPECT_EQ(end.text, "");
  int status = 0;
  ASSERT_EQ(waitpid(strangers, &status, 0), strangers);
  EXPECT_EQ(status, 0);
}

TEST(TcpRendezvous, MoreRanksThanDescriptorsAreSaidAsSuch) {
  const auto too_many_ranks = run_with_descriptors(64, [] { meet(0, 1000, free_port(), {}, 20); });
  EXPECT_TRUE(holds(too_many_ranks.text, "rank 0 of 1000 needs 1000 descriptors, but "));
  EXPECT_TRUE(holds(too_many_ranks.text, " of 64 are open"));
}

TEST(TcpRendezvous, DescriptorsThatRunOutAreSaidAsSuch) {
#ifdef WAYBILL_TEST_UBSAN
  GTEST_SKIP() << "its checks of types need a descriptor themselves";
#endif
  const std::uint16_t port = free_port();
  const auto used_up = run_with_descriptors(64, [&] {
    std::string error;
    std::jthread rank_0([&] { error = error_of([&] { meet(0, 2, port, {}, 20); }); });
    test::sleep_s(0.2);
    const int caller = socket(AF_INET, SOCK_STREAM, 0);
    std::vector<int> opened;
    do {
      opened.push_back(open("/dev/null", O_RDONLY));
    } while (opened.back() >= 0);
    const sockaddr_in address = test::loopback(port);
    (void)connect(caller, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    rank_0.join();
    std::ranges::for_each(opened, close);
    throw std::runtime_error(error);
  });
  EXPECT_TRUE(holds(used_up.text, "rank 0 cannot take a caller: Too many open files, "));
  EXPECT_TRUE(holds(used_up.text, " of 64 descriptors are open"));
}

TEST(TcpRendezvous, OverIPv6) {
  const std::uint16_t port = free_port();
  expect_no_errors(test::run_ranks(3, [&](std::int32_t rank) {
    LaunchEnvironment environment;
    environment.rank = rank;
    environment.world_size = 3;
    environment.rendezvous = concat("tcp://[::1]:", port);
    const auto bootstrap = make_environment_bootstrap(environment, 20);
    ASSERT_EQ(all_gather_value(*bootstrap, rank, "test"), (std::vector<std::int32_t>{0, 1, 2}));
    bootstrap->barrier("end");
  }));
}

/// A server that says the same to everybody.
std::string error_beside_a_server(std::string_view says, const JobIdentity& job) {
  const std::uint16_t port = free_port();
  const int door = socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = test::loopback(port);
  EXPECT_EQ(bind(door, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(listen(door, 5), 0);
  std::string error;
  const Stopwatch watch;
  std::jthread rank_1([&] { error = error_of([&] { meet(1, 2, port, job); }); });
  const int caller = accept(door, nullptr, nullptr);
  EXPECT_EQ(send(caller, says.data(), says.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(says.size()));
  rank_1.join();
  EXPECT_LT(watch.seconds(), 5);
  close(caller);
  close(door);
  return error;
}

TEST(TcpRendezvous, WhatIsNoRank0IsNotTaken) {
  const auto text_of = [](const detail::Answer& answer) {
    const auto bytes = encode(answer);
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  std::string banner = "SSH-2.0-OpenSSH_9.2\r\n";
  banner.resize(sizeof(detail::Answer), ' ');
  EXPECT_TRUE(holds(error_beside_a_server(banner, {}), "what answers there is not Waybill"));
  const std::string accepted = text_of({.kind = detail::AnswerKind::accepted});
  EXPECT_TRUE(holds(error_beside_a_server(accepted, {.id = {}, .secret = "x"}),
                    "does not know WAYBILL_RENDEZVOUS_SECRET"));
  const std::string prove = text_of({.kind = detail::AnswerKind::prove});
  EXPECT_TRUE(holds(error_beside_a_server(prove, {}), "asked for a secret that was not offered"));
  EXPECT_TRUE(holds(error_beside_a_server(prove + accepted, {.id = {}, .secret = "x"}),
                    "does not know WAYBILL_RENDEZVOUS_SECRET"));
  const std::string refused = text_of({.why = "\x1b[2J no"});
  EXPECT_TRUE(holds(error_beside_a_server(refused, {}), "refused rank 1:  [2J no"));
}

/// What rank 0 says when rank 1, let in as it should be, goes on with these bytes.
std::string error_of_rank_0(const std::vector<std::byte>& bytes) {
  const std::uint16_t port = free_port();
  std::string error;
  std::jthread rank_0([&] { error = error_of([&] { meet(0, 2, port); }); });
  const RawCaller rank_1(port);
  rank_1.say_bytes(encode(detail::Hello{.world_size = 2, .rank = 1}));
  rank_1.say_bytes(bytes);
  (void)rank_1.hear(4);
  rank_0.join();
  return error;
}

TEST(TcpRendezvous, AFrameThatPromisesTooMuchEndsItsRank) {
  const auto frame = [](const detail::FrameHeader& header) {
    const auto bytes = encode(header);
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  const Stopwatch watch;
  EXPECT_TRUE(holds(error_of_rank_0(frame({.round = 1, .size_bytes = std::uint64_t{1} << 60})),
                    "meet: rank 1 left"));
  EXPECT_TRUE(holds(error_of_rank_0(frame({.round = 7, .size_bytes = 0})), "meet: rank 1 left"));
  EXPECT_TRUE(holds(error_of_rank_0(std::vector<std::byte>(64, std::byte{9})), "rank 1 left"));
  EXPECT_LT(watch.seconds(), 5);
}

}  // namespace
}  // namespace waybill
