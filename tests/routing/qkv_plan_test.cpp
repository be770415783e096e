#include "waybill/routing/qkv_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "support/expect_error.h"
#include "support/kv_model.h"
#include "support/random_plan.h"
#include "support/seeded.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

using test::Dice;
using test::for_seeds;
using test::rejects;

/// Ranks of 2, 0 and 3 shards; documents 0: shards 3, 1, 0; 1: none; 2: shards 2, 4.
QkvPlan good_plan() {
  QkvPlan plan;
  plan.world_size = 3;
  plan.rank_shard_offsets = {0, 2, 2, 5};
  plan.shard_len = {4, 0, 7, 1, 2};
  plan.q_dst = {0, 2, 2, 1, 0};
  plan.doc_shard_offsets = {0, 3, 3, 5};
  plan.doc_shards = {3, 1, 0, 2, 4};
  plan.kv_begin = {1, 1, 0, 0, 1};
  return plan;
}

::testing::AssertionResult rejected(const std::function<void(QkvPlan&)>& damage,
                                    std::initializer_list<std::string_view> parts) {
  QkvPlan plan = good_plan();
  damage(plan);
  const auto named = rejects([&] { plan.check("caller"); }, {"caller: "});
  return named ? rejects([&] { plan.check("caller"); }, parts) : named;
}

TEST(QkvPlanCheck, AcceptsTheGoodPlan) {
  EXPECT_NO_THROW(good_plan().check("caller"));
  QkvPlan causal = good_plan();
  causal.kv_begin.clear();
  EXPECT_NO_THROW(causal.check("caller"));
  EXPECT_EQ(causal.num_shards(), 5);
  EXPECT_EQ(causal.num_documents(), 3);
}

TEST(QkvPlanCheck, AcceptsAPlanOfNothing) {
  QkvPlan plan;
  plan.world_size = 2;
  plan.rank_shard_offsets = {0, 0, 0};
  plan.doc_shard_offsets = {0};
  EXPECT_NO_THROW(plan.check("caller"));
  EXPECT_EQ(plan.num_documents(), 0);
}

TEST(QkvPlanCheck, WorldSize) {
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.world_size = 0; }, {"world_size: got 0"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.world_size = -3; }, {"world_size: got -3"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.world_size = max_world_size + 1; }, {"world_size"}));
  EXPECT_TRUE(rejects([] { QkvPlan().check("caller"); }, {"caller", "world_size: got 0"}));
}

TEST(QkvPlanCheck, RankShardOffsets) {
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.rank_shard_offsets.pop_back(); },
                       {"rank_shard_offsets", "3", "4"}));
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.rank_shard_offsets.clear(); }, {"rank_shard_offsets", "0", "4"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.rank_shard_offsets[0] = 1; },
                       {"rank_shard_offsets", "got 1", "0"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.rank_shard_offsets[2] = 1; },
                       {"rank_shard_offsets", "got 1", "2"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.rank_shard_offsets[3] = 4; },
                       {"rank_shard_offsets", "got 4", "5"}));
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.rank_shard_offsets[1] = -2; }, {"rank_shard_offsets", "got -2"}));
}

TEST(QkvPlanCheck, Shards) {
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.shard_len[2] = -7; }, {"shard_len", "shard 2", "got -7"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.shard_len[2] = (std::int64_t{1} << 40) + 1; },
                       {"shard_len", "shard 2", "at most 1099511627776 in all"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.shard_len[2] = std::int64_t{1} << 40; },
                       {"shard_len", "shard 2", "at most 1099511627776 in all"}));
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.shard_len.assign(5, std::int64_t{1} << 62); }, {"shard_len"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.q_dst[4] = 3; }, {"q_dst", "shard 4", "got 3", "0..2"}));
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.q_dst[0] = -1; }, {"q_dst", "shard 0", "got -1", "0..2"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.q_dst.pop_back(); }, {"q_dst", "4", "5"}));
}

TEST(QkvPlanCheck, Documents) {
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.doc_shards[3] = 5; }, {"doc_shards", "got 5 at 3", "0..4"}));
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.doc_shards[3] = -1; }, {"doc_shards", "got -1 at 3", "0..4"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.doc_shards[4] = 1; },
                       {"doc_shards: shard 1", "again at 4", "once"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.doc_shards.pop_back(); }, {"doc_shards", "4", "5"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.doc_shards.push_back(0); }, {"doc_shards", "6", "5"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.doc_shard_offsets.back() = 4; },
                       {"doc_shard_offsets", "got 4", "5"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.doc_shard_offsets[2] = 2; },
                       {"doc_shard_offsets", "got 2", "3"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.doc_shard_offsets[0] = 1; },
                       {"doc_shard_offsets", "got 1", "0"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.doc_shard_offsets.clear(); }, {"doc_shard_offsets"}));
}

TEST(QkvPlanCheck, Windows) {
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.kv_begin.pop_back(); }, {"kv_begin", "4", "5"}));
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.kv_begin[1] = 2; }, {"kv_begin", "shard 1", "got 2", "1"}));
  EXPECT_TRUE(
      rejected([](QkvPlan& p) { p.kv_begin[0] = 0; }, {"kv_begin", "shard 0", "got 0", "1"}));
  EXPECT_TRUE(rejected([](QkvPlan& p) { p.kv_begin[3] = -1; }, {"kv_begin", "shard 3", "got -1"}));
}

// good_plan's documents hold shards at positions 0..2 and 0..1.
TEST(QkvPlanCheck, RangesEndAfterTheirShardAndDoNotMoveBack) {
  QkvPlan plan = good_plan();
  plan.need_whole_documents();
  EXPECT_NO_THROW(plan.check("here"));
  EXPECT_TRUE(plan.needs_whole_documents());
  const auto fails = [&](std::int64_t place, std::int32_t end) {
    QkvPlan changed = plan;
    const std::int32_t shard = plan.doc_shards[place];
    changed.kv_end[shard] = end;
    EXPECT_FALSE(changed.needs_whole_documents());
    return rejects([&] { changed.check("here"); },
                   {"kv_end", concat("shard ", shard), concat("got ", end)});
  };
  const std::int64_t last = plan.doc_shard_offsets[1] - 1;
  EXPECT_TRUE(fails(0, static_cast<std::int32_t>(last + 2)));
  EXPECT_TRUE(fails(last, static_cast<std::int32_t>(last)));
  EXPECT_TRUE(fails(0, -1));
  // 0 stands for the shard's own end, and its queries meet none after themselves.
  const std::int32_t end = plan.doc_shards[last];
  EXPECT_FALSE(plan.is_causal(end));
  const std::vector<std::int64_t> full = shard_work(plan);
  plan.kv_end[end] = 0;
  EXPECT_NO_THROW(plan.check("here"));
  EXPECT_FALSE(plan.needs_whole_documents());
  EXPECT_TRUE(plan.is_causal(end));
  EXPECT_EQ(plan.end_needed(end, static_cast<std::int32_t>(last)), last + 1);
  const std::int64_t tokens = plan.shard_len[end];
  EXPECT_EQ(shard_work(plan)[end], full[end] - tokens * (tokens - 1) / 2);
  plan.kv_end.pop_back();
  EXPECT_TRUE(rejects([&] { plan.check("here"); }, {"kv_end"}));
}

TEST(QkvPlanCheck, TheCallersOfAPlanCheckIt) {
  QkvPlan plan = good_plan();
  plan.q_dst[1] = 3;
  EXPECT_TRUE(rejects([&] { (void)compute_qkv_routing(plan); },
                      {"compute_qkv_routing", "q_dst: rank 0, shard 1"}));
  EXPECT_TRUE(
      rejects([&] { (void)to_raw_dispatch(plan); }, {"to_raw_dispatch", "q_dst: rank 0, shard 1"}));
}

TEST(QkvPlanCheck, TheDenseFormHasNoWindows) {
  EXPECT_TRUE(rejects([] { (void)to_raw_dispatch(good_plan()); }, {"to_raw_dispatch", "kv_begin"}));
  QkvPlan causal = good_plan();
  causal.kv_begin.assign(5, 0);
  EXPECT_NO_THROW((void)to_raw_dispatch(causal));
}

TEST(KvLayoutText, Names) {
  EXPECT_EQ(to_string(KvLayout::per_query), "per_query");
  EXPECT_EQ(to_string(KvLayout::per_rank), "per_rank");
}

TEST(RandomPlanProperty, IsAlwaysGood) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const bool stay = dice.coin();
    const bool windows = dice.coin();
    const QkvPlan plan = test::random_plan(
        seed,
        {.world_size = dice.in_range(1, 65), .documents_stay_on_rank = stay, .windows = windows});
    plan.check("random_plan");
    const QkvPlan again = test::random_plan(
        seed, {.world_size = plan.world_size, .documents_stay_on_rank = stay, .windows = windows});
    EXPECT_TRUE(plan == again);
  });
}

/// What a plan has of the edges, as names.
std::vector<std::string> edges_of(const QkvPlan& plan, const test::RandomPlanOptions& options) {
  std::vector<std::string> edges;
  std::int64_t ranks_with_tokens = 0;
  std::int64_t full_ranks = 0;
  for (std::size_t w = 0; w < static_cast<std::size_t>(plan.world_size); ++w) {
    const auto first = plan.shard_len.begin() + plan.rank_shard_offsets[w];
    const auto last = plan.shard_len.begin() + plan.rank_shard_offsets[w + 1];
    const std::int64_t rows = std::accumulate(first, last, std::int64_t{0});
    ranks_with_tokens += rows > 0 ? 1 : 0;
    full_ranks += rows == options.max_shards_per_rank * options.max_shard_len ? 1 : 0;
    if (rows == 0) edges.push_back(concat("rank ", w, " without tokens"));
  }
  const std::int64_t rows =
      std::accumulate(plan.shard_len.begin(), plan.shard_len.end(), std::int64_t{0});
  if (ranks_with_tokens == 1 && rows > 1) edges.emplace_back("one rank has all");
  if (rows == 1) edges.emplace_back("one token");
  if (full_ranks == plan.world_size) edges.emplace_back("exactly the maximum");
  std::int64_t empty = 0;
  bool whole = false;
  for (std::size_t d = 0; d + 1 < plan.doc_shard_offsets.size(); ++d) {
    const std::int64_t shards = plan.doc_shard_offsets[d + 1] - plan.doc_shard_offsets[d];
    empty += shards == 0 ? 1 : 0;
    whole = whole || (shards > 1 && shards == plan.num_shards());
  }
  if (empty >= 3) edges.emplace_back("empty documents");
  if (whole) edges.emplace_back("one document");
  if (rows > 1 && plan.num_documents() > rows) edges.emplace_back("more documents than rows");
  return edges;
}

// A plan that breaks something is drawn often, not once in a hundred.
TEST(RandomPlanProperty, DrawsTheEdges) {
  for (const bool stay : {false, true}) {
    const test::RandomPlanOptions options{.world_size = 4, .documents_stay_on_rank = stay};
    std::map<std::string, int> found;
    for (std::uint64_t seed = 0; seed < 400; ++seed) {
      for (const std::string& edge : edges_of(test::random_plan(seed, options), options)) {
        ++found[edge];
      }
    }
    std::vector<std::string> expected = {"one rank has all",    "one token",
                                         "exactly the maximum", "empty documents",
                                         "one document",        "more documents than rows"};
    for (int w = 0; w < 4; ++w) expected.push_back(concat("rank ", w, " without tokens"));
    for (const std::string& edge : expected) EXPECT_GE(found[edge], 12) << edge;
  }
}

/// Counts the pairs one by one.
std::int64_t count_pairs(const QkvPlan& plan, const std::vector<test::ShardPlace>& places,
                         std::size_t shard) {
  std::int64_t before = 0;
  const std::int64_t from = plan.kv_begin.empty() ? 0 : plan.kv_begin[shard];
  std::int64_t all = 0;
  const auto end = plan.kv_end.empty() ? 0 : plan.kv_end[shard];
  for (std::int64_t p = from; p < end; ++p) {
    all += plan.shard_len[test::shard_at(plan, places[shard].doc, p)];
  }
  if (!plan.kv_end.empty()) return plan.shard_len[shard] * all;
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
    const std::vector<std::int64_t> work = shard_work(plan);
    std::vector<std::int64_t> ranks(static_cast<std::size_t>(plan.world_size));
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
  EXPECT_TRUE(
      rejects([&] { (void)shard_work(plan); }, {"shard_work", "q_dst", "shard 0", "got 1"}));
}

}  // namespace
}  // namespace waybill
