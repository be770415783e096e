// Worlds of more ranks than 64, as threads: a step of each, and what they meet for.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>

#include "support/run_processes.h"
#include "support/sanitizers.h"
#include "support/sequence_step.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

using test::Expected;
using test::SequenceCase;
using test::to_size;

/// One shard a rank; documents of eight shards that lie W / 8 ranks apart, so rows come from all
/// over the world; every query goes to another rank.
SequenceCase spread_case(std::int32_t world_size, KvLayout layout) {
  std::vector<std::vector<std::int64_t>> shards;
  std::vector<std::int32_t> dst;
  for (std::int32_t r = 0; r < world_size; ++r) {
    shards.push_back({1 + r % 3});
    dst.push_back((r * 5 + 1) % world_size);
  }
  QkvPlan plan = test::plain_plan(world_size, shards, dst, layout);
  const std::int32_t documents = world_size / 8;
  plan.doc_shards.clear();
  plan.doc_shard_offsets = {0};
  for (std::int32_t d = 0; d < documents; ++d) {
    for (std::int32_t s = 0; s < 8; ++s) plan.doc_shards.push_back(d + s * documents);
    plan.doc_shard_offsets.push_back(std::ssize(plan.doc_shards));
  }
  SequenceCase sample{concat(world_size, " ranks"), compute_qkv_routing(plan)};
  sample.q.hidden = 4;
  sample.k.hidden = sample.v.hidden = 3;
  return sample;
}

class ManyRanks : public testing::TestWithParam<std::int32_t> {};

TEST_P(ManyRanks, step_equals_the_simulation) {
  const std::int32_t world_size = GetParam();
  const SequenceCase sample = spread_case(world_size, KvLayout::per_rank);
  const Expected expected(sample);
  run_thread_world(world_size, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    test::check_step(world, dispatcher, sample, expected);
    dispatcher.close();
  });
}

TEST_P(ManyRanks, step_over_nodes_equals_the_simulation) {
  const std::int32_t world_size = GetParam();
  const SequenceCase sample = spread_case(world_size, KvLayout::per_query);
  const Expected expected(sample);
  run_thread_world(world_size,
                   [&](World& world) {
                     SequenceDispatcher dispatcher(world);
                     test::check_step(world, dispatcher, sample, expected);
                     dispatcher.close();
                   },
                   {.ranks_per_node = 8});
}

TEST_P(ManyRanks, meet_and_share) {
  const std::int32_t world_size = GetParam();
  std::atomic<std::int32_t> arrived = 0;
  run_ranks_as_threads(world_size, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const std::int32_t me = to_int(bootstrap->rank());
    const auto all = all_gather_value(*bootstrap, me * 3, "exchange");
    for (std::int32_t r = 0; r < world_size; ++r) ASSERT_EQ(all[r], r * 3);
    for (int round = 1; round <= 3; ++round) {
      ++arrived;
      bootstrap->barrier("barrier");
      ASSERT_GE(arrived, round * world_size);
    }
    ASSERT_TRUE(on_one_host(*bootstrap));
  });
}

TEST_P(ManyRanks, the_one_that_is_missing_is_named) {
  const std::int32_t world_size = GetParam();
  const std::int32_t missing = world_size - 2;
  try {
    run_ranks_as_threads(world_size, [&](std::shared_ptr<Bootstrap> bootstrap) {
      World world = make_thread_world(bootstrap);
      world.barrier();
      if (to_int(bootstrap->rank()) == missing) throw IoError("gave up");
      world.barrier();
    });
    FAIL() << "expected an error";
  } catch (const IoError& error) {
    EXPECT_STREQ(error.what(), "gave up");
  }
}

#ifndef WAYBILL_TEST_SLOW
/// In a process of its own, which is limited.
TEST(ManyRanks, more_threads_than_the_host_allows_are_an_error_of_ours) {
  test::expect_no_errors(test::run_processes(1, [](std::int32_t) {
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = rlim_t{2} << 30;  // stacks have 8 MiB each
    require(setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit");
    try {
      run_ranks_as_threads(
          5000, [](const std::shared_ptr<Bootstrap>& bootstrap) { bootstrap->barrier("barrier"); });
    } catch (const Unsupported& error) {
      const std::string text = error.what();
      require(text.find(" of 5000 ranks have a thread") != text.npos, text);
      return;
    }
    throw InternalError("expected an error");
  }));
}
#endif

#ifdef WAYBILL_TEST_SLOW
INSTANTIATE_TEST_SUITE_P(Worlds, ManyRanks, testing::Values(72, 128));
#else
INSTANTIATE_TEST_SUITE_P(Worlds, ManyRanks, testing::Values(72, 128, 512));
#endif

}  // namespace
}  // namespace waybill
