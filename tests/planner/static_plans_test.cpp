#include "waybill/planner/static_plans.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "planner_cases.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"

namespace waybill {
namespace {

using test::Lengths;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(ZigzagPlan, ByHand) {
  // 16 tokens on two ranks: chunks of 4, rank 0 has the first and the last.
  const QkvPlan plan =
      zigzag_plan(Lengths{6, 10}, {.world_size = 2, .tokens_per_rank = 8, .degree = 2});
  EXPECT_EQ(plan.rank_shard_offsets, (Lengths{0, 2, 4}));
  EXPECT_EQ(plan.shard_len, (Lengths{4, 4, 2, 6}));
  EXPECT_EQ(plan.q_dst, (std::vector<std::int32_t>{0, 0, 1, 1}));
  EXPECT_EQ(plan.doc_shard_offsets, (Lengths{0, 2, 4}));
  // Document 0: 4 tokens on rank 0, 2 on rank 1. Document 1: 6 on rank 1, the last 4 on rank 0.
  EXPECT_EQ(plan.doc_shards, (std::vector<std::int32_t>{0, 2, 3, 1}));
  EXPECT_EQ(rank_work(plan), (Lengths{10 + 34, 11 + 21}));
}

TEST(PerDocumentPlan, ByHand) {
  const QkvPlan plan =
      per_document_plan(Lengths{8, 5}, {.world_size = 2, .tokens_per_rank = 8, .degree = 2});
  // Chunks 2 2 2 2 and 1 1 1 2, dealt 0 1 1 0; the two in the middle are one shard.
  EXPECT_EQ(plan.shard_len, (Lengths{2, 2, 1, 2, 4, 2}));
  EXPECT_EQ(plan.rank_shard_offsets, (Lengths{0, 4, 6}));
  EXPECT_EQ(rank_work(plan), (Lengths{3 + 15 + 1 + 9, 7 + 11 + 2 + 3}));
}

TEST(StaticPlans, AreRightForAnyDocuments) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const auto degree = static_cast<std::int32_t>(1 + random.below(6));
    const StaticPlanOptions options{
        .world_size = degree * static_cast<std::int32_t>(1 + random.below(5)),
        .tokens_per_rank = 1 + random.below(300),
        .degree = degree};
    const std::int64_t capacity = options.world_size * options.tokens_per_rank;
    const Lengths lengths = test::random_documents(random, random.below(capacity + 1), capacity);
    for (const auto& make : {zigzag_plan, per_document_plan}) {
      const QkvPlan plan = make(lengths, options);
      EXPECT_TRUE(validate(plan, compute_qkv_routing(plan)).empty()) << "seed " << seed;
      ASSERT_EQ(plan.num_documents(), std::ssize(lengths));
      for (std::size_t d = 0; d < lengths.size(); ++d) {
        std::int64_t tokens = 0;
        for (auto i = plan.doc_shard_offsets[d]; i < plan.doc_shard_offsets[d + 1]; ++i)
          tokens += plan.shard_len[static_cast<std::size_t>(
              plan.doc_shards[static_cast<std::size_t>(i)])];
        EXPECT_EQ(tokens, lengths[d]);
      }
    }
  }
}

TEST(StaticPlans, AreCutWherePrefixesEnd) {
  const Lengths lengths{90, 7, 40, 1};
  const Lengths prefixes{33, 9, 0, 1};
  StaticPlanOptions options{.world_size = 4,
                            .tokens_per_rank = 40,
                            .degree = 2,
                            .mask = {.kind = MaskKind::prefix},
                            .prefixes = prefixes};
  std::int64_t pairs = 0;
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    const AttentionMask mask{.kind = MaskKind::prefix, .prefix = prefixes[d]};
    pairs += mask.pairs(0, lengths[d], lengths[d]);
  }
  for (const auto& make : {zigzag_plan, per_document_plan}) {
    const QkvPlan plan = make(lengths, options);
    EXPECT_TRUE(validate(plan, compute_qkv_routing(plan)).empty());
    const Lengths work = rank_work(plan);
    EXPECT_EQ(std::accumulate(work.begin(), work.end(), std::int64_t{0}), pairs);
  }
  options.prefixes = {33};
  EXPECT_THROW((void)zigzag_plan(lengths, options), InvalidArgument);
}

TEST(StaticPlans, ChunksAreEvenWhereTheySaySo) {
  // One document a group: both deal it in the same way, and the work is even within a few chunks.
  const StaticPlanOptions options{.world_size = 16, .tokens_per_rank = 4096, .degree = 8};
  const Lengths one_a_group(2, 8 * 4096);
  EXPECT_EQ(zigzag_plan(one_a_group, options), per_document_plan(one_a_group, options));
  const auto work = rank_work(zigzag_plan(one_a_group, options));
  const auto [least, most] = std::minmax_element(work.begin(), work.end());
  EXPECT_LE(*most - *least, 4096);
  // Many documents: by document still even in the group, by sequence not.
  const Lengths lengths = {30000, 1000, 1000, 768, 8000, 8000, 8000, 8768};
  const auto spread = [](const Lengths& w, std::size_t first) {
    const auto [low, high] =
        std::minmax_element(w.begin() + static_cast<std::ptrdiff_t>(first),
                            w.begin() + static_cast<std::ptrdiff_t>(first + 8));
    return static_cast<double>(*high) / static_cast<double>(*low);
  };
  EXPECT_LT(spread(rank_work(per_document_plan(lengths, options)), 0), 1.01);
  EXPECT_GT(spread(rank_work(zigzag_plan(lengths, options)), 8), 1.2);
}

TEST(StaticPlans, TokensStayWithinTheRanks) {
  const StaticPlanOptions options{.world_size = 8, .tokens_per_rank = 333, .degree = 4};
  const QkvPlan plan = zigzag_plan(Lengths{8 * 333 - 5, 5}, options);
  for (std::size_t r = 0; r < 8; ++r) {
    EXPECT_EQ(
        std::accumulate(plan.shard_len.begin() + plan.rank_shard_offsets[r],
                        plan.shard_len.begin() + plan.rank_shard_offsets[r + 1], std::int64_t{0}),
        333);
  }
}

TEST(StaticPlans, DegreeOfAWorld) {
  EXPECT_EQ(StaticPlanOptions::degree_of(64, 8), 8);
  EXPECT_EQ(StaticPlanOptions::degree_of(4, 8), 4);
  EXPECT_EQ(StaticPlanOptions::degree_of(12, 8), 6);
  EXPECT_EQ(StaticPlanOptions::degree_of(13, 8), 1);
}

TEST(StaticPlans, RefuseWhatMakesNoSense) {
  EXPECT_EQ(message_of([] { (void)zigzag_plan(Lengths{4}, {.world_size = 6, .degree = 4}); }),
            "zigzag_plan: degree = 4, expected a divisor of world_size = 6");
  EXPECT_EQ(message_of([] {
              (void)per_document_plan(Lengths{4, 0}, {});
            }),
            "per_document_plan: doc_lengths[1] = 0, expected >= 1");
  EXPECT_EQ(
      message_of([] {
        (void)zigzag_plan(Lengths{9, 8}, {.world_size = 2, .tokens_per_rank = 8, .degree = 2});
      }),
      "zigzag_plan: doc_lengths[0..1] exceed world_size * tokens_per_rank = 16");
  EXPECT_EQ(message_of([] {
              (void)plan_of_pieces({{0, 4, 1, 0, 0}}, 1, 2);
            }),
            "plan_of_pieces: pieces[0].document = 1, expected 0..0");
  EXPECT_EQ(message_of([] {
              (void)plan_of_pieces({{0, 4, 0, 2, 0}}, 1, 2);
            }),
            "plan_of_pieces: pieces[0].home = 2, expected 0..1");
}

}  // namespace
}  // namespace waybill
