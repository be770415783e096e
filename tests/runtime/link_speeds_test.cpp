// Speeds of a machine's links, given to a world.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "runtime/executor.h"
#include "support/run_ranks.h"
#include "transport/transport.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill {
namespace {

constexpr LinkSpeeds slow{.nvlink_bytes_per_second = 60e9,
                          .network_bytes_per_second = 5e9,
                          .block_bytes_per_second = 20e9};

TEST(LinkSpeeds, dispatchers_take_those_of_their_world) {
  run_thread_world(2, [](World& world) {
    EXPECT_EQ(world.links(), LinkSpeeds{});
    SequenceDispatcher before(world);
    world.use_links(slow);
    EXPECT_EQ(world.links(), slow);
    SequenceDispatcher after(world);
    EXPECT_EQ(before.options().plan.nvlink_bytes_per_second, 345e9);
    EXPECT_EQ(after.options().plan.nvlink_bytes_per_second, 60e9);
    EXPECT_EQ(after.options().plan.network_bytes_per_second, 5e9);
    SequenceDispatcherOptions own;
    own.plan.network_bytes_per_second = 7e9;
    SequenceDispatcher with_own(world, own);
    EXPECT_EQ(with_own.options().plan.network_bytes_per_second, 7e9);
    EXPECT_EQ(with_own.options().plan.nvlink_bytes_per_second, 345e9);
  });
}

TEST(LinkSpeeds, ranks_give_the_same) {
  const auto results = test::run_with_bootstrap(3, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    World world = make_thread_world(std::move(bootstrap));
    LinkSpeeds mine = slow;
    if (world.rank() == Rank{2}) mine.block_bytes_per_second = 30e9;
    world.use_links(mine);
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.text,
              "World::use_links: rank 2 with block_bytes_per_second = 3e+10, the others 2e+10, "
              "expected the same on all ranks");
  }
}

TEST(LinkSpeeds, wrong_ones_of_one_rank_all_are_told_at_once) {
  const auto results = test::run_with_bootstrap(2, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    World world = make_thread_world(std::move(bootstrap));
    LinkSpeeds mine = slow;
    if (world.rank() == Rank{1}) mine.nvlink_bytes_per_second = 0;
    world.use_links(mine);
  });
  EXPECT_EQ(results[0].text.find("World::use_links: rank 1 with arguments = wrong (nvlink_bytes"),
            0)
      << results[0].text;
  EXPECT_EQ(results[1].text.find("World::use_links: nvlink_bytes_per_second = 0"), 0)
      << results[1].text;
}

/// Ranks of GPUs, as far as a world asks for their name.
class OnDevice final : public Executor {
 public:
  explicit OnDevice(std::string name) : name_(std::move(name)) {}
  [[nodiscard]] std::string device_name() const override { return name_; }
  std::unique_ptr<UploadedPlan> upload(const SequencePlan& /*plan*/, Stream /*stream*/) override {
    return nullptr;
  }
  void refill(UploadedPlan& /*uploaded*/, const SequencePlan& /*plan*/,
              Stream /*stream*/) override {}
  void dispatch(const SequenceCall& /*call*/) override {}
  void kv_gradient(const SequenceCall& /*call*/) override {}
  void synchronize(Stream /*stream*/) override {}
  void finish() override {}

 private:
  std::string name_;
};

std::string said_of(const std::string& device, std::string_view measured_on) {
  testing::internal::CaptureStderr();
  test::expect_no_errors(test::run_with_bootstrap(4, 20, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const World world(make_thread_transport(std::move(bootstrap), 2),
                      std::make_unique<OnDevice>(device));
    world.use_links(slow, measured_on);
    EXPECT_EQ(world.links(), slow);
  }));
  (void)std::fflush(stderr);
  return testing::internal::GetCapturedStderr();
}

TEST(LinkSpeeds, those_of_other_gpus_are_used_and_named_once_a_node) {
  const std::string said = said_of("NVIDIA H200", "NVIDIA H100\nPCIe");
  for (const char* rank : {"0", "2"}) {
    const std::string line = concat(
        "waybill: World::use_links: these speeds were measured on NVIDIA H100\\x0aPCIe, but "
        "rank ",
        rank, " has NVIDIA H200; ");
    EXPECT_NE(said.find(line), std::string::npos) << said;
  }
  EXPECT_EQ(std::ranges::count(said, '\n'), 2) << said;
}

TEST(LinkSpeeds, those_of_the_same_gpus_of_none_and_in_host_memory_are_not_talked_about) {
  EXPECT_EQ(said_of("NVIDIA H200", "NVIDIA H200"), "");
  EXPECT_EQ(said_of("NVIDIA H200", ""), "");
  EXPECT_EQ(said_of("", "NVIDIA H200"), "");
}

TEST(LinkSpeeds, wrong_ones_are_refused) {
  run_thread_world(1, [](World& world) {
    EXPECT_THROW(world.use_links({.nvlink_bytes_per_second = 0}), InvalidArgument);
    EXPECT_EQ(world.links(), LinkSpeeds{});
  });
}

}  // namespace
}  // namespace waybill
