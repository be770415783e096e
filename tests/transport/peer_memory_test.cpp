#include <gtest/gtest.h>

#include <algorithm>

#include "support/expect_error.h"
#include "support/run_ranks.h"
#include "transport/peer_transport.h"

namespace waybill {
namespace {

/// What each of three ranks gets, or throws.
std::vector<test::RankResult> agree_of(const std::vector<PeerAccessWish>& wishes,
                                       const std::vector<std::string>& troubles,
                                       std::vector<PeerMemory>& chosen,
                                       const std::string& refused = {}) {
  chosen.assign(3, PeerMemory::device);
  return test::run_with_bootstrap(3, 10, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const auto r = static_cast<std::size_t>(to_int(bootstrap->rank()));
    chosen[r] = agree_on_peer_memory(*bootstrap, "world", wishes[r], troubles[r], refused);
  });
}

using Wish = PeerAccessWish;
const std::vector<PeerMemory> all_device(3, PeerMemory::device);
const std::vector<PeerMemory> all_host(3, PeerMemory::host);
const std::vector<std::string> no_trouble(3);
const std::vector<std::string> trouble_of_1{"", "device 1 cannot reach the memory of device 0", ""};

TEST(PeerMemory, is_that_of_devices_where_they_reach_each_other) {
  std::vector<PeerMemory> chosen;
  test::expect_no_errors(agree_of(std::vector(3, Wish::any), no_trouble, chosen));
  EXPECT_EQ(chosen, all_device);
  test::expect_no_errors(agree_of(std::vector(3, Wish::required), no_trouble, chosen));
  EXPECT_EQ(chosen, all_device);
}

TEST(PeerMemory, is_the_hosts_for_all_where_one_reaches_not_all) {
  std::vector<PeerMemory> chosen;
  testing::internal::CaptureStderr();
  test::expect_no_errors(agree_of(std::vector(3, Wish::any), trouble_of_1, chosen));
  EXPECT_EQ(chosen, all_host);
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(line, '\n'), 1) << line;
  for (const char* part : {"pinned memory of the host", "PCIe", "rank 1: device 1 cannot reach",
                           "WAYBILL_PEER_ACCESS=required"}) {
    EXPECT_NE(line.find(part), std::string::npos) << line;
  }
}

TEST(PeerMemory, can_be_forced_by_any_rank) {
  std::vector<PeerMemory> chosen;
  testing::internal::CaptureStderr();
  test::expect_no_errors(agree_of({Wish::any, Wish::any, Wish::none}, no_trouble, chosen));
  EXPECT_EQ(chosen, all_host);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("rank 2: WAYBILL_PEER_ACCESS = none"),
            std::string::npos);
}

TEST(PeerMemory, can_be_refused_by_any_rank) {
  std::vector<PeerMemory> chosen;
  for (const auto& result :
       agree_of({Wish::any, Wish::any, Wish::required}, trouble_of_1, chosen)) {
    EXPECT_EQ(
        result.text,
        "world: GPUs without access to each other's memory (rank 1: device 1 cannot reach the "
        "memory of device 0), and the host's cannot be used instead (rank 2: "
        "WAYBILL_PEER_ACCESS = required)");
  }
  for (const auto& result :
       agree_of(std::vector(3, Wish::any), trouble_of_1, chosen, "NCCL connects the nodes")) {
    EXPECT_NE(result.text.find("(rank 0: NCCL connects the nodes)"), std::string::npos)
        << result.text;
  }
}

TEST(PeerMemory, wishes_are_words) {
  EXPECT_EQ(peer_access_wish(nullptr), Wish::any);
  EXPECT_EQ(peer_access_wish(""), Wish::any);
  EXPECT_EQ(peer_access_wish("none"), Wish::none);
  EXPECT_EQ(peer_access_wish("required"), Wish::required);
  EXPECT_TRUE(test::rejects([] { (void)peer_access_wish("some\n"); },
                            {"WAYBILL_PEER_ACCESS", "expected none or required"}));
}

}  // namespace
}  // namespace waybill
