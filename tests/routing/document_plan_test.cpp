#include "waybill/routing/document_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "support/expect_error.h"
#include "support/kv_model.h"
#include "support/random_plan.h"
#include "support/seeded.h"
#include "support/sum.h"

namespace waybill {
namespace {

using test::Dice;
using test::for_seeds;
using test::rejects;
using test::sum;

using Lengths = std::vector<std::int64_t>;

Lengths random_lengths(std::uint64_t seed, std::int64_t count, std::int64_t longest) {
  Random random(seed);
  Lengths lengths(static_cast<std::size_t>(count));
  for (std::int64_t& length : lengths) length = 1 + random.below(longest);
  return lengths;
}

Lengths document_lens(const QkvPlan& plan, std::int64_t doc) {
  Lengths lens;
  for (std::int64_t p = 0; p < test::document_shards(plan, doc); ++p) {
    lens.push_back(plan.shard_len[test::shard_at(plan, doc, p)]);
  }
  return lens;
}

TEST(PlanDocuments, PacksInOrderAndCutsAcrossRanks) {
  const Lengths lengths{6, 3, 7};
  const QkvPlan plan =
      plan_documents(lengths, {.world_size = 2, .tokens_per_rank = 8, .shard_tokens = 8});
  EXPECT_EQ(plan.rank_shard_offsets, (std::vector<std::int64_t>{0, 2, 4}));
  EXPECT_EQ(plan.shard_len, (Lengths{6, 2, 1, 7}));
  EXPECT_EQ(plan.doc_shard_offsets, (Lengths{0, 1, 3, 4}));
  EXPECT_EQ(plan.doc_shards, (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_TRUE(plan.kv_begin.empty());
}

TEST(PlanDocuments, NoDocuments) {
  const QkvPlan plan = plan_documents({}, {.world_size = 3});
  EXPECT_EQ(plan.num_shards(), 0);
  EXPECT_EQ(plan.num_documents(), 0);
  plan.check("plan_documents");
}

TEST(PlanDocuments, ExactlyFullAndOneTooMany) {
  const DocumentPlanOptions options{.world_size = 2, .tokens_per_rank = 8, .shard_tokens = 3};
  EXPECT_NO_THROW((void)plan_documents(Lengths{16}, options));
  EXPECT_TRUE(rejects(
      [&] {
        (void)plan_documents(Lengths{9, 8}, options);
      },
      {"plan_documents", "doc_lengths", "17", "16"}));
}

TEST(PlanDocuments, Errors) {
  const auto fails = [](const Lengths& lengths, const DocumentPlanOptions& options,
                        std::initializer_list<std::string_view> parts) {
    return rejects([&] { (void)plan_documents(lengths, options); }, parts);
  };
  EXPECT_TRUE(fails({4, 0}, {}, {"plan_documents", "doc_lengths[1] = 0"}));
  EXPECT_TRUE(fails({4, -5}, {}, {"plan_documents", "doc_lengths[1] = -5"}));
  EXPECT_TRUE(fails({std::int64_t{1} << 62, std::int64_t{1} << 62}, {}, {"doc_lengths[0]"}));
  EXPECT_TRUE(fails({4}, {.world_size = 0}, {"world_size = 0"}));
  EXPECT_TRUE(fails({4}, {.tokens_per_rank = 0}, {"tokens_per_rank = 0"}));
  EXPECT_TRUE(fails({4}, {.tokens_per_rank = std::int64_t{1} << 60}, {"tokens_per_rank"}));
  EXPECT_TRUE(fails({4}, {.shard_tokens = 0}, {"shard_tokens = 0"}));
}

TEST(PlanDocumentsProperty, EveryTokenOnceInOrder) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const Lengths lengths = random_lengths(seed, dice.in_range<std::int64_t>(0, 30), 200);
    DocumentPlanOptions options;
    options.world_size = dice.in_range(1, 17);
    options.shard_tokens = dice.in_range<std::int64_t>(1, 90);
    options.tokens_per_rank = std::max<std::int64_t>(
        1, (sum(lengths) + options.world_size - 1) / options.world_size + dice.in_range(0, 50));
    options.kv_layout = dice.one_of({KvLayout::per_query, KvLayout::per_rank});
    const QkvPlan plan = plan_documents(lengths, options);
    plan.check("plan_documents");
    EXPECT_TRUE(plan == plan_documents(lengths, options));
    EXPECT_EQ(plan.kv_layout, options.kv_layout);
    ASSERT_EQ(plan.num_documents(), std::ssize(lengths));
    EXPECT_LE(test::most_rows_of_a_rank(plan), options.tokens_per_rank);
    const auto places = test::shard_places(plan);
    for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
      const Lengths lens = document_lens(plan, d);
      EXPECT_EQ(sum(lens), lengths[static_cast<std::size_t>(d)]);
      for (std::size_t p = 0; p < lens.size(); ++p) {
        EXPECT_GE(lens[p], 1);
        EXPECT_LE(lens[p], options.shard_tokens);
      }
    }
    // Packed in order: the documents' shards are the shards in order.
    for (std::size_t i = 0; i < plan.doc_shards.size(); ++i) {
      EXPECT_EQ(plan.doc_shards[i], static_cast<std::int32_t>(i));
    }
  });
}

// The pieces of a document on one rank are equal, to one token, and no more than needed.
TEST(PlanDocumentsProperty, PiecesOfARankAreEqual) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const Lengths lengths = random_lengths(seed, 12, 300);
    const auto longest = dice.in_range<std::int64_t>(1, 100);
    const QkvPlan plan = plan_documents(
        lengths,
        {.world_size = 4, .tokens_per_rank = (sum(lengths) + 3) / 4, .shard_tokens = longest});
    const auto places = test::shard_places(plan);
    for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
      for (std::int64_t w = 0; w < 4; ++w) {
        Lengths here;
        for (std::int64_t p = 0; p < test::document_shards(plan, d); ++p) {
          const std::size_t shard = test::shard_at(plan, d, p);
          if (places[shard].rank == w) here.push_back(plan.shard_len[shard]);
        }
        if (here.empty()) continue;
        const auto [least, most] = std::minmax_element(here.begin(), here.end());
        EXPECT_LE(*most - *least, 1);
        EXPECT_EQ(std::ssize(here), (sum(here) + longest - 1) / longest);
      }
    }
  });
}

// The bound of the longest processing time rule: no rank is over the mean by more than a shard.
TEST(PlanDocumentsProperty, WorkIsBalanced) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const Lengths lengths = random_lengths(seed, dice.in_range<std::int64_t>(1, 40), 500);
    const auto world_size = dice.in_range<std::int32_t>(1, 17);
    const QkvPlan plan =
        plan_documents(lengths, {.world_size = world_size,
                                 .tokens_per_rank = (sum(lengths) + world_size - 1) / world_size,
                                 .shard_tokens = dice.in_range<std::int64_t>(8, 200)});
    const Lengths work = shard_work(plan);
    const Lengths ranks = rank_work(plan);
    EXPECT_EQ(std::ssize(ranks), world_size);
    EXPECT_EQ(sum(ranks), sum(work));
    const std::int64_t mean = sum(work) / world_size;
    EXPECT_LE(*std::max_element(ranks.begin(), ranks.end()),
              mean + *std::max_element(work.begin(), work.end()));
  });
}

/// Counts the pairs one by one.
std::int64_t count_pairs(const QkvPlan& plan, const std::vector<test::ShardPlace>& places,
                         std::size_t shard) {
  std::int64_t before = 0;
  const std::int64_t from = plan.kv_begin.empty() ? 0 : plan.kv_begin[shard];
  std::int64_t all = 0;
  for (std::int64_t p = 0; p < test::document_shards(plan, places[shard].doc); ++p) {
    all += plan.shard_len[test::shard_at(plan, places[shard].doc, p)];
  }
  if (plan.mask == MaskKind::full) return plan.shard_len[shard] * all;
  for (std::int64_t p = from; p < places[shard].pos; ++p) {
    before += plan.shard_len[test::shard_at(plan, places[shard].doc, p)];
  }
  std::int64_t pairs = 0;
  for (std::int64_t query = 0; query < plan.shard_len[shard]; ++query) {
    for (std::int64_t key = 0; key < before + plan.shard_len[shard]; ++key) {
      if (key <= before + query) ++pairs;
    }
  }
  return pairs;
}

TEST(ShardWorkProperty, IsTheNumberOfPairs) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const bool windows = dice.coin();
    const bool full = dice.coin();
    const QkvPlan plan = test::random_plan(
        seed, {.world_size = dice.in_range(1, 6), .windows = windows, .full = full});
    const auto places = test::shard_places(plan);
    const Lengths work = shard_work(plan);
    Lengths ranks(static_cast<std::size_t>(plan.world_size));
    ASSERT_EQ(std::ssize(work), plan.num_shards());
    for (std::size_t s = 0; s < places.size(); ++s) {
      EXPECT_EQ(work[s], count_pairs(plan, places, s));
      ranks[static_cast<std::size_t>(plan.q_dst[s])] += work[s];
    }
    EXPECT_EQ(rank_work(plan), ranks);
  });
}

TEST(ShardWork, Errors) {
  QkvPlan plan;
  plan.world_size = 1;
  plan.rank_shard_offsets = {0, 1};
  plan.shard_len = {std::int64_t{1} << 31};
  plan.q_dst = {0};
  plan.doc_shard_offsets = {0, 1};
  plan.doc_shards = {0};
  const std::int64_t longest = std::int64_t{1} << 31;
  EXPECT_EQ(shard_work(plan)[0], longest / 2 * (longest + 1));
  plan.shard_len = {(std::int64_t{1} << 31) + 1};
  EXPECT_TRUE(rejects([&] { (void)shard_work(plan); }, {"shard_work", "document 0", "2^31"}));
  EXPECT_TRUE(rejects([&] { (void)rank_work(plan); }, {"document 0", "2^31"}));
  plan.q_dst = {1};
  EXPECT_TRUE(rejects([&] { (void)shard_work(plan); }, {"shard_work", "q_dst[0] = 1"}));
}

}  // namespace
}  // namespace waybill
