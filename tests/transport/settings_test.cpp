#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "support/expect_error.h"
#include "support/run_ranks.h"
#include "transport/transport.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

std::string text_of(std::int32_t world_size,
                    const std::function<std::vector<Setting>(std::int32_t)>& settings) {
  const auto results =
      test::run_with_bootstrap(world_size, 20, [&](std::shared_ptr<Bootstrap> bootstrap) {
        require_same(*bootstrap, "test", settings(to_int(bootstrap->rank())));
      });
  for (const auto& result : results) EXPECT_EQ(result.text, results[0].text);
  return results[0].text;
}

TEST(Settings, TheSameIsFine) {
  EXPECT_EQ(text_of(3,
                    [](std::int32_t) {
                      return std::vector<Setting>{{"a", "1"}, {"b", ""}};
                    }),
            "");
  EXPECT_EQ(text_of(2, [](std::int32_t) { return std::vector<Setting>{}; }), "");
}

TEST(Settings, WhoDiffersIsNamedWithWhatOthersHave) {
  EXPECT_EQ(text_of(4,
                    [](std::int32_t rank) {
                      return std::vector<Setting>{{"a", "1"}, {"b", rank == 2 ? "7" : "8"}};
                    }),
            "test: rank 2 with b = 7, the others 8, expected the same on all ranks");
  EXPECT_EQ(text_of(5,
                    [](std::int32_t rank) {
                      return std::vector<Setting>{{"a", rank % 2 == 1 ? "x" : "y"}};
                    }),
            "test: ranks 1, 3 with a = x, the others y, expected the same on all ranks");
}

TEST(Settings, WorldsSayWhichRankHasOtherNodes) {
  const auto results = test::run_with_bootstrap(4, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    const std::int32_t ranks_per_node = bootstrap->rank() == Rank{3} ? 1 : 2;
    (void)make_thread_transport(std::move(bootstrap), ranks_per_node);
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.text,
              "world: rank 3 with ranks_per_node = 1, the others 2, expected the same on all "
              "ranks");
  }
}

TEST(Settings, WorldsSayWhichRankHasAnotherRelease) {
  constexpr std::string_view name("waybill version\0", 16);
  // Rank 1 says what rank 0 says, but for the first digit of its version.
  const auto gather = [&](const Bootstrap::Bytes& mine) {
    const std::string_view text(reinterpret_cast<const char*>(mine.data()), mine.size());
    const std::size_t at = text.find(name);
    Bootstrap::Bytes theirs = mine;
    if (at != std::string_view::npos) theirs[at + name.size()] = std::byte{'9'};
    return std::vector<Bootstrap::Bytes>{mine, theirs};
  };
  EXPECT_TRUE(
      test::rejects([&] { (void)make_thread_transport(make_callable_bootstrap(0, 2, gather)); },
                    {"world: rank 1 with waybill version = 9.", ", the others 0."}));
}

}  // namespace
}  // namespace waybill
