// Plans that even out what the kernel takes and not pairs alone, and pieces that give away ends.
#include <gtest/gtest.h>

#include <algorithm>

#include "planner/balance.h"
#include "planner_cases.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"

namespace waybill {
namespace {

using test::Lengths;

PlannerOptions with_costs(Random& random, PlannerOptions options) {
  options.hardware.row_pairs = random.below(100);
  options.hardware.shard_pairs = random.below(400);
  options.tails = random.below(2) == 0;
  return options;
}

TEST(KernelCosts, RandomPlansAreValidAndEven) {
  int num_over = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const PlannerOptions options = with_costs(random, test::random_options(random, seed % 3 == 0));
    const AttentionPlan plan = plan_attention(test::random_flat(random, options), options);
    const std::vector<Finding> findings = validate(plan);
    ASSERT_TRUE(findings.empty()) << "seed " << seed << ": " << findings.front();
    num_over += plan.balanced() ? 0 : 1;
  }
  EXPECT_LE(num_over, 6);  // each cut adds what a shard takes
}

TEST(KernelCosts, ReachTheTargetWhereShardsAreLong) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Random random(seed);
    PlannerOptions options{.world_size = 8, .tokens_per_rank = 16384};
    options.hardware.row_pairs = 300;
    options.hardware.shard_pairs = 50000;
    options.tails = seed % 2 == 0;
    const Lengths lengths = test::random_documents(random, 8 * 16384, 40000);
    const AttentionPlan plan = plan_attention(lengths, options);
    EXPECT_LE(plan.imbalance(), 1.012) << "seed " << seed;
  }
}

// What a shard takes can fill a rank beyond its room while it is given a document's regions, one
// after another: the planner must go on with the next rank, not look for a part that fits for ever.
TEST(KernelCosts, ShardsThatWeighMoreThanTheirPairsArePlanned) {
  PlannerOptions options{.world_size = 3, .tokens_per_rank = 1000};
  options.block_tokens = 100;
  options.imbalance_target = 1.05;
  options.hardware.row_pairs = 2;
  options.hardware.shard_pairs = 76922;
  const Lengths lengths{466, 331, 86, 303, 504, 707, 603};
  const AttentionPlan plan = plan_attention(lengths, options);
  const std::vector<Finding> findings = validate(plan);
  EXPECT_TRUE(findings.empty()) << findings.front();
}

TEST(KernelCosts, ManyShortDocumentsWeighMoreThanTheirPairs) {
  const std::vector<Lengths> lists{{9000, 500}, Lengths(500, 60)};
  PlannerOptions options{.world_size = 2, .tokens_per_rank = 0};
  const AttentionPlan pairs = plan_attention(lists, options);
  options.hardware.row_pairs = 200;
  options.hardware.shard_pairs = 50000;
  const AttentionPlan costs = plan_attention(lists, options);
  EXPECT_LT(costs.attention_tokens[1], pairs.attention_tokens[1]);
  EXPECT_EQ(attention_plan_from_json(to_json(costs)), costs);
  EXPECT_NE(to_json(costs).find("\"row_pairs\""), std::string::npos);
  EXPECT_EQ(to_json(pairs).find("\"row_pairs\""), std::string::npos);
}

TEST(KernelCosts, TailsLeaveOneShardOfAPieceAtHome) {
  const std::vector<Lengths> lists{{20000}, {18000}};
  PlannerOptions options{.world_size = 2, .tokens_per_rank = 0};
  const auto shards_at_home = [&] {
    const QkvPlan plan = plan_attention(lists, options).plan;
    return std::count(plan.q_dst.begin(), plan.q_dst.begin() + plan.rank_shard_offsets[1], 0);
  };
  EXPECT_EQ(shards_at_home(), 2);
  options.tails = true;
  EXPECT_EQ(shards_at_home(), 1);
}

/// What the shards of a plan take, counted again: [W].
std::vector<std::int64_t> load_of(const QkvPlan& plan, const PlannerOptions& options) {
  std::vector<std::int64_t> load(static_cast<std::size_t>(plan.world_size));
  const auto at = [](const auto& table, std::int64_t i) {
    return static_cast<std::int64_t>(table[static_cast<std::size_t>(i)]);
  };
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = at(plan.doc_shard_offsets, d);
    const std::int64_t last = at(plan.doc_shard_offsets, d + 1);
    std::int64_t doc_len = 0;
    for (auto i = first; i < last; ++i) doc_len += at(plan.shard_len, at(plan.doc_shards, i));
    std::int64_t begin = 0;
    for (auto i = first; i < last; ++i) {
      const std::int64_t shard = at(plan.doc_shards, i);
      const std::int64_t end = begin + at(plan.shard_len, shard);
      load[static_cast<std::size_t>(at(plan.q_dst, shard))] +=
          kernel_work(options.mask, options.hardware, begin, end, doc_len);
      begin = end;
    }
  }
  return load;
}

TEST(KernelCosts, TheBalancerCountsTheShardsOfItsPlan) {
  int num_cut_twice = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    PlannerOptions options = with_costs(random, test::random_options(random, seed % 3 == 0));
    options.mask.window = 0;  // a window cuts shards where keys begin to be needed, too
    detail::HomeLayout home;
    if (seed % 2 == 0) {
      detail::lay_out(test::random_flat(random, options), options, home);
    } else {
      options.tokens_per_rank = 0;
      PlannerOptions drawn = options;
      drawn.tokens_per_rank = 2000;
      detail::lay_out(test::random_lists(random, drawn), options, home);
    }
    detail::Balancer balancer;
    balancer.run(home, options, options.imbalance_target);
    QkvPlan plan;
    detail::write_plan(home, balancer.moves(), options, plan);
    ASSERT_EQ(balancer.load(), load_of(plan, options)) << "seed " << seed;
    const auto& moves = balancer.moves();
    const auto twice = std::ranges::adjacent_find(moves, {}, &detail::Move::piece);
    num_cut_twice += twice != moves.end() ? 1 : 0;
  }
  EXPECT_GT(num_cut_twice, 100);
}

TEST(KernelCosts, ErrorsNameTheArgument) {
  PlannerOptions options;
  options.hardware.row_pairs = -1;
  EXPECT_THROW((void)plan_attention(Lengths{10}, options), InvalidArgument);
  options.hardware = {};
  options.hardware.shard_pairs = (std::int64_t{1} << 40) + 1;
  EXPECT_THROW((void)plan_attention(Lengths{10}, options), InvalidArgument);
}

}  // namespace
}  // namespace waybill
