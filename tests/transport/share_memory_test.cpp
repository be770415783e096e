#include "transport/share_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "support/run_ranks.h"

namespace waybill {
namespace {

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

}  // namespace
}  // namespace waybill
