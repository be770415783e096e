#include <gtest/gtest.h>

#include <algorithm>

#include "planner_cases.h"
#include "support/expect_error.h"

namespace waybill {
namespace {

using test::Lengths;
using test::rejects;

std::int64_t most_tokens(const AttentionPlan& plan) {
  std::int64_t most = 0;
  for (std::size_t r = 0; r < plan.work.size(); ++r)
    most = std::max({most, plan.attention_tokens[r], plan.kv_tokens[r]});
  return most;
}

// From what the plan without a limit needs down to where none is found: the limit is kept, or the
// error says which rank needs how much.
TEST(PlannerCapacity, IsKeptOrInfeasible) {
  int num_plans = 0;
  int num_refused = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    Random random(seed);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    const Lengths lengths = test::random_flat(random, options);
    const std::int64_t free = most_tokens(plan_attention(lengths, options));
    for (const double share : {1.0, 0.9, 0.7, 0.5, 0.3}) {
      options.max_tokens_per_rank =
          std::max<std::int64_t>(1, static_cast<std::int64_t>(share * static_cast<double>(free)));
      try {
        const AttentionPlan plan = plan_attention(lengths, options);
        ++num_plans;
        ASSERT_LE(most_tokens(plan), options.max_tokens_per_rank) << "seed " << seed;
        ASSERT_TRUE(validate(plan).empty()) << to_string(validate(plan).front());
      } catch (const InvalidArgument& error) {
        ++num_refused;
        ASSERT_NE(std::string(error.what()).find("infeasible: rank"), std::string::npos)
            << error.what();
      }
    }
  }
  EXPECT_GT(num_plans, 800);
  EXPECT_GT(num_refused, 250);
}

// Home alone keeps the limit, so a plan must be found.
TEST(PlannerCapacity, WhatFitsAtHomeIsPlanned) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed + 500);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    // A document that is cut where its prefix ends needs that twice per query.
    if (options.mask.kind == MaskKind::prefix) options.kv_layout = KvLayout::per_rank;
    const auto lists = test::random_lists(random, options);
    for (const Lengths& list : lists) {
      std::int64_t tokens = 0;
      for (const std::int64_t length : list) tokens += length;
      options.max_tokens_per_rank = std::max(options.max_tokens_per_rank, tokens);
    }
    if (options.max_tokens_per_rank == 0) continue;
    const AttentionPlan plan = plan_attention(lists, options);
    ASSERT_LE(most_tokens(plan), options.max_tokens_per_rank) << "seed " << seed;
    ASSERT_TRUE(validate(plan).empty()) << to_string(validate(plan).front());
  }
}

// With room to spare the balance is as good as without a limit.
TEST(PlannerCapacity, LeavesTheBalanceWhereThereIsRoom) {
  Random random(3);
  PlannerOptions options{.world_size = 16, .tokens_per_rank = 16384};
  const Lengths lengths = test::random_documents(random, 16 * 16384, 30000);
  options.max_tokens_per_rank = 3 * 16384;
  const AttentionPlan plan = plan_attention(lengths, options);
  EXPECT_LE(plan.imbalance(), 1.01);
  EXPECT_LE(most_tokens(plan), 3 * 16384);
}

TEST(PlannerCapacity, SaysWhichRankNeedsHowMuch) {
  PlannerOptions options{.world_size = 4, .tokens_per_rank = 71680};
  options.max_tokens_per_rank = 65536;
  const std::vector<Lengths> lists{{100}, {100}, {100}, {71680}};
  EXPECT_TRUE(rejects([&] { (void)plan_attention(lists, options); },
                      {"infeasible: rank 3 needs 71680 tokens", "has 65536"}));
}

// A rank with too many documents gives some away, whatever the balance says.
TEST(PlannerCapacity, MovesDocumentsThatDoNotFitAtHome) {
  PlannerOptions options{.world_size = 2, .tokens_per_rank = 0};
  options.max_tokens_per_rank = 600;
  const std::vector<Lengths> lists{Lengths(10, 100), {}};
  const AttentionPlan plan = plan_attention(lists, options);
  EXPECT_LE(most_tokens(plan), 600);
  EXPECT_TRUE(validate(plan).empty());
}

// A short end of a document has to leave its home for lack of room. That it is better off with the
// rest of its document must not move it again.
TEST(PlannerCapacity, APieceThatHadToLeaveLeavesOnce) {
  PlannerOptions options{.world_size = 4, .tokens_per_rank = 100};
  options.imbalance_target = 1.2;
  options.block_tokens = 8;
  options.max_tokens_per_rank = 107;
  const Lengths lengths{39, 45, 18, 26, 43, 30, 27, 30, 29, 14, 44};
  const AttentionPlan plan = plan_attention(lengths, options);
  EXPECT_LE(most_tokens(plan), 107);
  EXPECT_EQ(plan.home_tokens, (Lengths{100, 100, 100, 45}));
  EXPECT_TRUE(validate(plan).empty());
}

}  // namespace
}  // namespace waybill
