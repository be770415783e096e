// Memory that ranks share: blocks of threads, and files of processes that are opened, mapped and
// unlinked.

#include "transport/share_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "support/rendezvous.h"
#include "support/run_ranks.h"
#include "transport/transport.h"

namespace waybill {
namespace {

using detail::SharedFile;
using test::error_of;
using test::holds;

/// Another bootstrap whose rank stands still behind an exchange until it may go on.
class StallingBootstrap final : public Bootstrap {
 public:
  StallingBootstrap(Bootstrap& inner, const std::atomic<bool>& go_on)
      : Bootstrap(to_int(inner.rank()), inner.world_size(), inner.timeout_s()),
        inner_(inner),
        go_on_(go_on) {}

 private:
  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    auto all = inner_.all_gather(mine, operation);
    while (!go_on_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return all;
  }

  Bootstrap& inner_;
  const std::atomic<bool>& go_on_;
};

/// Writes over the part of the stack that a call left behind.
[[gnu::noinline]] void write_over_the_stack() {
  volatile char junk[16384];
  for (std::size_t i = 0; i < sizeof(junk); ++i) junk[i] = 0x5a;
}

TEST(ShareMemory, ARankThatHasGivenUpLeavesNothingToRead) {
  std::atomic<bool> gave_up = false;
  const std::atomic<bool> at_once = true;
  auto bootstraps = make_thread_bootstraps(2, 0.3);
  const auto results = test::run_ranks(2, [&](std::int32_t rank) {
    StallingBootstrap own(*bootstraps[static_cast<std::size_t>(rank)],
                          rank == 0 ? at_once : gave_up);
    if (rank == 0) {
      try {
        (void)share_memory(own, std::make_shared<int>(1), 4, "test");
      } catch (const Timeout&) {
        write_over_the_stack();
        gave_up = true;
        throw;
      }
    } else {
      (void)share_memory(own, std::make_shared<int>(2), 4, "test");
    }
  });
  EXPECT_EQ(test::timeout_of(results[0]).peer, 1);
  EXPECT_EQ(results[1].text, "share_memory(test): rank 0 has given up");
}

TEST(ShareMemory, EveryRankHasTheBlocksOfAll) {
  test::expect_no_errors(test::run_with_bootstrap(3, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    const auto mine = std::make_shared<std::int32_t>(to_int(bootstrap->rank()));
    const auto all = share_memory(*bootstrap, mine, 4, "test");
    for (std::size_t r = 0; r < 3; ++r) {
      ASSERT_EQ(*static_cast<const std::int32_t*>(all[r].get()), static_cast<std::int32_t>(r));
    }
  }));
}

/// A name in /dev/shm, gone with the object.
class Planted {
 public:
  explicit Planted(std::string_view kind)
      : name_(concat("/waybill-test-", kind, "-", getpid())), path_("/dev/shm" + name_) {}
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;
  ~Planted() { (void)::unlink(path_.c_str()); }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const char* path() const { return path_.c_str(); }
  [[nodiscard]] bool exists() const { return access(path(), F_OK) == 0; }

 private:
  std::string name_;
  std::string path_;
};

std::string error_of_open(const Planted& planted) {
  return error_of([&] { (void)SharedFile::open(planted.name()); });
}

TEST(SharedFile, OnlyANewFileOfThisUserIsOpened) {
  const Planted planted("file");
  const SharedFile mine = SharedFile::create(planted.name());
  EXPECT_TRUE(holds(error_of([&] { (void)SharedFile::create(planted.name()); }), "File exists"));
  EXPECT_EQ(error_of_open(planted), "");
  mine.reserve(1);
  EXPECT_TRUE(holds(error_of_open(planted), "has 1 bytes, expected a new file of user "));
  const Planted fifo("fifo");
  ASSERT_EQ(mkfifo(fifo.path(), 0600), 0);
  EXPECT_TRUE(holds(error_of_open(fifo), "expected a new file of user "));
  const Planted link("link");
  ASSERT_EQ(symlink("/etc/passwd", link.path()), 0);
  EXPECT_TRUE(holds(error_of_open(link), "cannot open the shared memory "));
  if (geteuid() == 0) {
    const Planted foreign("foreign");
    const SharedFile file = SharedFile::create(foreign.name());
    ASSERT_EQ(chown(foreign.path(), 65534, 65534), 0);
    EXPECT_TRUE(holds(error_of_open(foreign), "is of user 65534"));
  }
}

TEST(SharedFile, AShortFileIsNotMapped) {
  const Planted planted("short");
  const SharedFile mine = SharedFile::create(planted.name());
  EXPECT_TRUE(holds(error_of([&] { (void)mine.map(1); }), "has 0 bytes, expected 1"));
  mine.reserve(4096);
  EXPECT_EQ(error_of([&] { (void)mine.map(4096); }), "");
  EXPECT_TRUE(holds(error_of([&] { (void)mine.map(4097); }), "has 4096 bytes, expected 4097"));
  ASSERT_EQ(truncate(planted.path(), 100), 0);
  EXPECT_TRUE(holds(error_of([&] { (void)mine.map(4096); }), "has 100 bytes, expected 4096"));
}

/// Passes on what others give, but changes what rank 1 says in one exchange.
std::unique_ptr<Bootstrap> lying_bootstrap(std::shared_ptr<Bootstrap> honest, int lie_in,
                                           std::string_view lie) {
  const auto rank = to_int(honest->rank());
  const auto world_size = honest->world_size();
  auto exchanges = std::make_shared<int>(0);
  const auto gather = [honest, exchanges, lie_in, lie](const Bootstrap::Bytes& mine) {
    auto all = honest->all_gather(mine, "test");
    if ((*exchanges)++ == lie_in) {
      for (std::size_t i = 0; i < all[1].size(); ++i) {
        all[1][i] = static_cast<std::byte>(lie[i % lie.size()]);
      }
    }
    return all;
  };
  return make_callable_bootstrap(rank, world_size, gather, 5);
}

/// Whatever a rank says, files that are not of these ranks stay, and nothing is mapped by chance.
TEST(ProcessTransport, ALyingRankReachesNothingOfOthers) {
  const Planted planted("other-job");
  const SharedFile other = SharedFile::create(planted.name());
  other.reserve(64);
  const std::vector<std::string> lies{planted.name() + std::string(1, '\0'),
                                      planted.name(),
                                      "/waybill-../../etc/passwd",
                                      "/tmp/x",
                                      std::string(64, 'x'),
                                      std::string(8, '\xFF')};
  for (const std::string& lie : lies) {
    for (int exchange = 0; exchange < 8; ++exchange) {
      const auto results =
          test::run_with_bootstrap(2, 5, [&](const std::shared_ptr<Bootstrap>& honest) {
            const auto transport = make_process_transport(lying_bootstrap(honest, exchange, lie));
            const SymmetricBuffer buffer = transport->allocate(64, "test");
            for (std::byte* part : buffer.peers) EXPECT_EQ(part[63], std::byte{0});
          });
      ASSERT_TRUE(planted.exists()) << lie << " in exchange " << exchange;
      struct stat status {};
      ASSERT_EQ(stat(planted.path(), &status), 0);
      ASSERT_EQ(status.st_nlink, 1U);
    }
  }
}

}  // namespace
}  // namespace waybill
