#include "waybill/transport/bootstrap.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <filesystem>
#include <mutex>

#include "support/expect_error.h"
#include "support/rendezvous.h"
#include "support/run_ranks.h"

namespace waybill {
namespace {

using test::expect_no_errors;
using test::free_port;
using test::holds;
using test::RankResult;
using test::rejects;
using test::run_ranks;
using test::timeout_of;

enum class Engine { threads, tcp, file, callable };

std::filesystem::path new_folder() {
  static std::atomic<int> next = 0;
  return std::filesystem::temp_directory_path() /
         concat("waybill_bootstrap_", getpid(), "_", next++);
}

/// Makes the bootstrap of each rank of one world.
class Maker {
 public:
  Maker(Engine engine, std::int32_t world_size, double timeout_s)
      : engine_(engine), world_size_(world_size), timeout_s_(timeout_s) {
    if (engine == Engine::tcp) port_ = free_port();
    if (engine == Engine::file) folder_ = new_folder();
    threads_ = make_thread_bootstraps(world_size, timeout_s);
  }
  ~Maker() {
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }
  Maker(const Maker&) = delete;
  Maker& operator=(const Maker&) = delete;

  [[nodiscard]] std::unique_ptr<Bootstrap> make(std::int32_t rank) {
    auto& of_threads = threads_[static_cast<std::size_t>(rank)];
    switch (engine_) {
      case Engine::tcp:
        return make_tcp_bootstrap(rank, world_size_, "127.0.0.1", port_, timeout_s_);
      case Engine::file:
        return make_file_bootstrap(rank, world_size_, folder_.string(), timeout_s_);
      case Engine::callable:
        return make_callable_bootstrap(
            rank, world_size_,
            [&of_threads](const Bootstrap::Bytes& mine) {
              return of_threads->all_gather(mine, "callable");
            },
            timeout_s_);
      case Engine::threads:
        break;
    }
    return std::move(of_threads);
  }

 private:
  Engine engine_;
  std::int32_t world_size_;
  double timeout_s_;
  std::uint16_t port_ = 0;
  std::filesystem::path folder_;
  std::vector<std::unique_ptr<Bootstrap>> threads_;
};

/// Entry of rank r in round k: r + k bytes with the value r.
Bootstrap::Bytes entry(std::int32_t rank, int round) {
  return Bootstrap::Bytes(static_cast<std::size_t>(rank + round), static_cast<std::byte>(rank));
}

class BootstrapTest : public testing::TestWithParam<Engine> {};

TEST_P(BootstrapTest, EveryRankGetsWhatAllGave) {
  for (const std::int32_t world : {1, 2, 5}) {
    Maker maker(GetParam(), world, 20);
    expect_no_errors(run_ranks(world, [&](std::int32_t rank) {
      const auto bootstrap = maker.make(rank);
      ASSERT_EQ(bootstrap->rank(), Rank{rank});
      ASSERT_EQ(bootstrap->world_size(), world);
      for (int round = 0; round < 20; ++round) {
        const auto all = bootstrap->all_gather(entry(rank, round), "test");
        for (std::int32_t r = 0; r < world; ++r) {
          ASSERT_EQ(all[static_cast<std::size_t>(r)], entry(r, round)) << "round " << round;
        }
      }
      const auto values = all_gather_value(*bootstrap, std::int64_t{rank} * 7, "test");
      for (std::int32_t r = 0; r < world; ++r) {
        ASSERT_EQ(values[static_cast<std::size_t>(r)], r * 7);
      }
      bootstrap->barrier("end");  // rank 0 of TCP must not leave before the others have all
    }));
  }
}

TEST_P(BootstrapTest, RanksThatMeanOtherExchangesAreToldSo) {
  Maker maker(GetParam(), 3, 20);
  expect_no_errors(run_ranks(3, [&](std::int32_t rank) {
    const auto bootstrap = maker.make(rank);
    const std::string mine = rank == 1 ? "window of dispatcher 2" : "window of dispatcher 1";
    try {
      (void)all_gather_value(*bootstrap, rank, mine);
      ADD_FAILURE() << "rank " << rank << " was given what another exchange is for";
    } catch (const Disagreement& error) {
      const std::string text = error.what();
      EXPECT_TRUE(text.starts_with(mine + ": ranks disagree in exchange 1: rank ")) << text;
      EXPECT_NE(text.find(rank == 1 ? "rank 0 window of dispatcher 1" : "rank 1 window of"),
                std::string::npos)
          << text;
    }
    ASSERT_EQ(all_gather_value(*bootstrap, rank, "end").size(), 3U);  // all were told alike
    bootstrap->barrier("end");
  }));
}

TEST_P(BootstrapTest, MoreThanAFewKilobytes) {
  Maker maker(GetParam(), 3, 20);
  expect_no_errors(run_ranks(3, [&](std::int32_t rank) {
    const auto bootstrap = maker.make(rank);
    const Bootstrap::Bytes mine(3'000'000, static_cast<std::byte>(rank + 1));
    const auto all = bootstrap->all_gather(mine, "large");
    for (std::size_t r = 0; r < 3; ++r) {
      ASSERT_EQ(all[r].size(), 3'000'000U);
      ASSERT_EQ(all[r].back(), static_cast<std::byte>(r + 1));
    }
    bootstrap->barrier("end");
  }));
}

TEST_P(BootstrapTest, ARankThatNeverCallsIsNamedByAllOthers) {
  Maker maker(GetParam(), 4, 0.4);
  std::mutex mutex;
  std::condition_variable changed;
  int failed = 0;
  const auto results = run_ranks(4, [&](std::int32_t rank) {
    const auto bootstrap = maker.make(rank);
    bootstrap->barrier("first");
    if (rank == 2) {  // is there, but silent, until the others have given up
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return failed == 3; });
      return;
    }
    try {
      bootstrap->barrier("second");
    } catch (...) {
      const std::lock_guard lock(mutex);
      ++failed;
      changed.notify_all();
      throw;
    }
  });
  for (const std::size_t r : {0U, 1U, 3U}) {
    const TimeoutInfo missed = timeout_of(results[r]);
    EXPECT_EQ(missed.rank, GetParam() == Engine::callable ? missed.rank : static_cast<int>(r));
    EXPECT_EQ(missed.peer, 2);
    EXPECT_EQ(missed.wanted, 2U);
    EXPECT_EQ(missed.seen, 1U);
    EXPECT_GE(missed.seconds, 0.3);
    EXPECT_LT(missed.seconds, 5.0);
    EXPECT_NE(results[r].text.find("for exchange >= 2 from rank 2; last seen 1"), std::string::npos)
        << results[r].text;
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, BootstrapTest,
                         testing::Values(Engine::threads, Engine::tcp, Engine::file,
                                         Engine::callable));

TEST(TcpBootstrap, ARankThatIsKilledIsNamedByAllOthers) {
  const std::uint16_t port = free_port();
  const pid_t victim = fork();
  if (victim == 0) {
    const auto bootstrap = make_tcp_bootstrap(2, 4, "127.0.0.1", port, 20);
    bootstrap->barrier("first");
    raise(SIGKILL);
  }
  const std::vector<std::int32_t> ranks{0, 1, 3};
  const auto results = run_ranks(3, [&](std::int32_t i) {
    const auto bootstrap =
        make_tcp_bootstrap(ranks[static_cast<std::size_t>(i)], 4, "127.0.0.1", port, 20);
    bootstrap->barrier("first");
    bootstrap->barrier("second");
  });
  int status = 0;
  ASSERT_EQ(waitpid(victim, &status, 0), victim);
  EXPECT_TRUE(WIFSIGNALED(status));
  for (const RankResult& result : results) {
    EXPECT_NE(result.text.find("second: rank 2 left"), std::string::npos) << result.text;
  }
}

TEST(TcpBootstrap, ARankThatNeverConnectsIsNamed) {
  const std::uint16_t port = free_port();
  const auto results = run_ranks(2, [&](std::int32_t rank) {
    const auto bootstrap = make_tcp_bootstrap(rank, 3, "127.0.0.1", port, 2);
    bootstrap->barrier("never");
  });
  EXPECT_EQ(timeout_of(results[0]).peer, 2);
  EXPECT_EQ(timeout_of(results[1]).peer, 2);  // rank 0 tells it
}

TEST(TcpBootstrap, NobodyListens) {
  const auto results = run_ranks(
      1, [&](std::int32_t) { (void)make_tcp_bootstrap(1, 2, "127.0.0.1", free_port(), 0.2); });
  EXPECT_EQ(timeout_of(results[0]).peer, 0);
}

TEST(Bootstrap, RejectsImpossibleRanks) {
  EXPECT_TRUE(rejects([] { (void)make_thread_bootstraps(0); }, {"world_size = 0"}));
  EXPECT_TRUE(rejects([] { (void)make_tcp_bootstrap(2, 2, "localhost", 1); }, {"rank = 2"}));
  EXPECT_TRUE(rejects([] { (void)make_tcp_bootstrap(0, 2, "localhost", 0); }, {"port = 0"}));
  EXPECT_TRUE(rejects([] { (void)make_thread_bootstraps(2, 0); }, {"timeout_s = 0"}));
  EXPECT_TRUE(rejects([] { (void)make_callable_bootstrap(0, 1, nullptr); }, {"empty"}));
}

TEST(Bootstrap, ACallableThatReturnsTooLittleIsFound) {
  const auto bootstrap = make_callable_bootstrap(
      0, 2, [](const Bootstrap::Bytes& mine) { return std::vector<Bootstrap::Bytes>{mine}; });
  EXPECT_THROW((void)bootstrap->all_gather({}, "short"), TransportError);
}

}  // namespace
}  // namespace waybill
