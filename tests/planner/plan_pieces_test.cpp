#include <gtest/gtest.h>

#include "planner_cases.h"
#include "support/expect_error.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"

namespace waybill {
namespace {

using test::Lengths;
using RankPieces = std::vector<std::vector<DocumentRange>>;

/// As flat documents are packed: the same number of rows per rank.
RankPieces packed(const Lengths& lengths, std::int32_t world_size, std::int64_t tokens_per_rank) {
  RankPieces ranks(static_cast<std::size_t>(world_size));
  std::size_t rank = 0;
  std::int64_t room = tokens_per_rank;
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    for (std::int64_t begin = 0; begin < lengths[d];) {
      if (room == 0) {
        ++rank;
        room = tokens_per_rank;
      }
      const std::int64_t rows = std::min(room, lengths[d] - begin);
      ranks.at(rank).push_back(
          {.document = 1000 + static_cast<std::int64_t>(d), .offset = begin, .length = rows});
      begin += rows;
      room -= rows;
    }
  }
  return ranks;
}

TEST(PlanPieces, EqualsPlanAttentionWhereDocumentsArePackedInOrder) {
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    PlannerOptions options = test::random_options(random, seed % 4 == 0);
    options.max_tokens_per_rank = 0;
    options.byte_weight = 0;
    options.relay = false;
    const Lengths lengths = test::random_documents(
        random, random.below(options.world_size * options.tokens_per_rank) + 1, 2000);
    const auto pieces = packed(lengths, options.world_size, options.tokens_per_rank);
    EXPECT_EQ(plan_pieces(pieces, options), plan_attention(lengths, options).plan);
  }
}

TEST(PlanPieces, IsRightAndEvenWhereverPiecesLie) {
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    PlannerOptions options = test::random_options(random, seed % 4 == 0);
    options.world_size = static_cast<std::int32_t>(1 + random.below(6));
    options.max_tokens_per_rank = 0;
    options.byte_weight = 0;
    options.kv_layout = KvLayout::per_query;
    RankPieces ranks(static_cast<std::size_t>(options.world_size));
    for (std::int64_t d = 0; d < 8; ++d) {
      const std::int64_t length = 1 + random.below(1500);
      for (std::int64_t begin = 0; begin < length;) {
        const std::int64_t rows = std::min(length - begin, 1 + random.below(400));
        auto& held = ranks[static_cast<std::size_t>(random.below(options.world_size))];
        held.insert(held.begin() + random.below(std::ssize(held) + 1),
                    {.document = d, .offset = begin, .length = rows});
        begin += rows;
      }
    }
    const QkvPlan plan = plan_pieces(ranks, options);
    EXPECT_TRUE(validate(plan, compute_qkv_routing(plan)).empty());
    if (options.mask.moves_on()) continue;  // rank_work counts whole shards
    const Lengths work = rank_work(plan);
    const double mean =
        static_cast<double>(std::accumulate(work.begin(), work.end(), 0LL)) / options.world_size;
    EXPECT_LT(static_cast<double>(*std::max_element(work.begin(), work.end())),
              mean * options.imbalance_target * 1.05 + 2000.0 * 128);
  }
}

TEST(PlanPieces, NamesWhatDoesNotAddUp) {
  PlannerOptions options;
  options.world_size = 2;
  const auto plan = [&](const RankPieces& ranks) {
    return [&, ranks] { (void)plan_pieces(ranks, options); };
  };
  EXPECT_TRUE(test::rejects(plan({{{7, 0, 4}}}), {"1 lists of pieces", "world_size 2"}));
  EXPECT_TRUE(test::rejects(plan({{{7, 0, 4}}, {{7, 6, 2}}}), {"document 7", "4..5", "rank 1"}));
  EXPECT_TRUE(test::rejects(plan({{{7, 0, 4}}, {{7, 3, 2}}}), {"token 3 is held twice", "rank 0"}));
  EXPECT_TRUE(test::rejects(plan({{}, {{7, 2, 2}}}), {"document 7: tokens 0..1"}));
  EXPECT_TRUE(test::rejects(plan({{{7, 0, 0}}, {}}), {"rank 0", "[0]", "length 0"}));
  EXPECT_TRUE(test::rejects(plan({{{7, -1, 3}}, {}}), {"rank 0", "offset -1"}));
  options.max_tokens_per_rank = 10;
  EXPECT_TRUE(test::rejects(plan({{}, {}}), {"max_tokens_per_rank = 10"}));
}

}  // namespace
}  // namespace waybill
