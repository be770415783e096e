// The sparse routing against a slow model of its documentation, for both layouts and windows.
#include "waybill/routing/qkv_routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "support/difference.h"
#include "support/expect_error.h"
#include "support/random_plan.h"
#include "support/routing_model.h"
#include "support/seeded.h"

namespace waybill {
namespace {

using test::Dice;
using test::for_seeds;
using test::RankModel;

template <class T, class Allocator>
std::vector<std::int64_t> plain(const std::vector<T, Allocator>& values) {
  return {values.begin(), values.end()};
}

using Pairs = std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t>;  // receiver, sender

void check_recv(const RecvCounts& recv, std::int32_t world_size, const Pairs& pairs) {
  RecvCounts expected;
  expected.offsets.push_back(0);
  for (std::int64_t r = 0; r < world_size; ++r) {
    std::int64_t total = 0;
    for (const auto& [ranks, rows] : pairs) {
      if (ranks.first != r || rows == 0) continue;
      expected.src_rank.push_back(static_cast<std::int32_t>(ranks.second));
      expected.tokens.push_back(rows);
      total += rows;
    }
    expected.offsets.push_back(std::ssize(expected.tokens));
    expected.total.push_back(total);
  }
  EXPECT_EQ(recv.offsets, expected.offsets);
  EXPECT_EQ(recv.src_rank, expected.src_rank);
  EXPECT_EQ(recv.tokens, expected.tokens);
  EXPECT_EQ(recv.total, expected.total);
}

std::int64_t begin_at_home(const QkvPlan& plan, const test::ShardPlace& home, std::size_t shard) {
  std::int64_t rows = 0;
  for (auto s =
           static_cast<std::size_t>(plan.rank_shard_offsets[static_cast<std::size_t>(home.rank)]);
       s < shard; ++s) {
    rows += plan.shard_len[s];
  }
  return rows;
}

void check_q(const QkvPlan& plan, const QkvRouting& got, const std::vector<RankModel>& ranks) {
  const auto places = test::shard_places(plan);
  EXPECT_EQ(got.fwd_q.rank_offsets, plan.rank_shard_offsets);
  EXPECT_EQ(plain(got.fwd_q.seq_len), plan.shard_len);
  EXPECT_TRUE(got.fwd_q.copy_offsets.empty());
  EXPECT_EQ(plain(got.fwd_q.dst_rank), plain(plan.q_dst));
  std::vector<std::int64_t> offset(places.size());
  std::vector<std::int64_t> rank_offsets{0}, rev_len, rev_rank, rev_offset;
  Pairs forward, back;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const test::QueryRead& read : ranks[r].queries) {
      const auto shard = static_cast<std::size_t>(read.shard);
      offset[shard] = read.q_begin;
      rev_len.push_back(plan.shard_len[shard]);
      rev_rank.push_back(places[shard].rank);
      rev_offset.push_back(begin_at_home(plan, places[shard], shard));
      forward[{static_cast<std::int64_t>(r), places[shard].rank}] += plan.shard_len[shard];
      back[{places[shard].rank, static_cast<std::int64_t>(r)}] += plan.shard_len[shard];
    }
    rank_offsets.push_back(std::ssize(rev_len));
  }
  EXPECT_EQ(plain(got.fwd_q.dst_offset), offset);
  EXPECT_EQ(got.rev_q.rank_offsets, rank_offsets);
  EXPECT_EQ(plain(got.rev_q.seq_len), rev_len);
  EXPECT_EQ(plain(got.rev_q.dst_rank), rev_rank);
  EXPECT_EQ(plain(got.rev_q.dst_offset), rev_offset);
  EXPECT_TRUE(got.rev_q.copy_offsets.empty());
  check_recv(got.fwd_q.recv, plan.world_size, forward);
  check_recv(got.rev_q.recv, plan.world_size, back);
}

void check_kv(const QkvPlan& plan, const QkvRouting& got, const std::vector<RankModel>& ranks) {
  const auto places = test::shard_places(plan);
  std::vector<std::int64_t> home_rows(static_cast<std::size_t>(plan.world_size));
  for (std::size_t s = 0; s < places.size(); ++s) {
    home_rows[static_cast<std::size_t>(places[s].rank)] += plan.shard_len[s];
  }
  std::vector<std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>>> copies(places.size());
  std::vector<std::int64_t> rank_offsets{0}, rev_len, rev_rank, rev_offset;
  Pairs forward, back;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const test::KvHeld& held : ranks[r].kv) {
      const auto shard = static_cast<std::size_t>(held.shard);
      const auto rank = static_cast<std::int64_t>(r);
      const bool fresh = copies[shard].emplace(held.copy, std::pair{rank, held.row}).second;
      EXPECT_TRUE(fresh);  // of the model: no copy number twice
      rev_len.push_back(plan.shard_len[shard]);
      rev_rank.push_back(places[shard].rank);
      rev_offset.push_back(held.copy * home_rows[static_cast<std::size_t>(places[shard].rank)] +
                           begin_at_home(plan, places[shard], shard));
      forward[{rank, places[shard].rank}] += plan.shard_len[shard];
      back[{places[shard].rank, rank}] += plan.shard_len[shard];
    }
    rank_offsets.push_back(std::ssize(rev_len));
  }
  std::vector<std::int64_t> copy_offsets{0}, dst_rank, dst_offset;
  for (const auto& of_shard : copies) {
    for (const auto& [copy, place] : of_shard) {
      dst_rank.push_back(place.first);
      dst_offset.push_back(place.second);
    }
    copy_offsets.push_back(std::ssize(dst_rank));
  }
  EXPECT_EQ(got.fwd_kv.rank_offsets, plan.rank_shard_offsets);
  EXPECT_EQ(plain(got.fwd_kv.seq_len), plan.shard_len);
  EXPECT_EQ(plain(got.fwd_kv.copy_offsets), copy_offsets);
  EXPECT_EQ(plain(got.fwd_kv.dst_rank), dst_rank);
  EXPECT_EQ(plain(got.fwd_kv.dst_offset), dst_offset);
  EXPECT_EQ(got.rev_kv.rank_offsets, rank_offsets);
  EXPECT_EQ(plain(got.rev_kv.seq_len), rev_len);
  EXPECT_EQ(plain(got.rev_kv.dst_rank), rev_rank);
  EXPECT_TRUE(got.rev_kv.copy_offsets.empty());
  EXPECT_EQ(plain(got.rev_kv.dst_offset), rev_offset);
  check_recv(got.fwd_kv.recv, plan.world_size, forward);
  check_recv(got.rev_kv.recv, plan.world_size, back);
}

void check_attention(const QkvPlan& plan, const QkvRouting& got,
                     const std::vector<RankModel>& ranks) {
  std::vector<std::int64_t> rank_offsets{0}, shard, q_begin, q_len, kv_begin, kv_len, max_q, max_kv;
  for (const RankModel& rank : ranks) {
    max_q.push_back(0);
    max_kv.push_back(0);
    for (const test::QueryRead& read : rank.queries) {
      shard.push_back(read.shard);
      q_begin.push_back(read.q_begin);
      q_len.push_back(plan.shard_len[static_cast<std::size_t>(read.shard)]);
      kv_begin.push_back(read.kv_begin);
      kv_len.push_back(read.kv_len);
      max_q.back() = std::max(max_q.back(), q_len.back());
      max_kv.back() = std::max(max_kv.back(), read.kv_len);
    }
    rank_offsets.push_back(std::ssize(shard));
  }
  const SparseAttnLayout& layout = got.attention;
  EXPECT_EQ(layout.rank_offsets, rank_offsets);
  EXPECT_EQ(plain(layout.shard), shard);
  EXPECT_EQ(plain(layout.q_begin), q_begin);
  EXPECT_EQ(plain(layout.q_len), q_len);
  EXPECT_EQ(plain(layout.kv_row), kv_begin);
  EXPECT_EQ(plain(layout.kv_len), kv_len);
  EXPECT_EQ(layout.max_seqlen_q, max_q);
  EXPECT_EQ(layout.max_seqlen_kv, max_kv);
}

void check_against_model(const QkvPlan& plan) {
  std::vector<RankModel> ranks = test::model_ranks(plan);
  if (plan.kv_layout == KvLayout::per_rank) {
    test::number_copies_per_rank(plan, ranks);
  } else {
    test::number_copies_per_query(plan, ranks);
  }
  const QkvRouting got = compute_qkv_routing(plan);
  EXPECT_EQ(got.kv_layout, plan.kv_layout);
  for (const SparseMetadata* table : {&got.fwd_q, &got.rev_q, &got.fwd_kv, &got.rev_kv}) {
    EXPECT_EQ(table->world_size, plan.world_size);
  }
  check_q(plan, got, ranks);
  check_attention(plan, got, ranks);
  check_kv(plan, got, ranks);
}

test::RandomPlanOptions random_options(Dice& dice, KvLayout layout, bool windows) {
  test::RandomPlanOptions options;
  options.kv_layout = layout;
  options.windows = windows;
  options.world_size = dice.coin() ? dice.in_range(1, 8) : dice.in_range(8, 65);
  options.max_shards_per_rank = dice.in_range<std::int64_t>(0, 9);
  options.max_document_shards = dice.one_of<std::int64_t>({1, 3, 8, 30});
  options.documents_stay_on_rank = dice.coin();
  options.destinations = dice.in_range(0, std::min(options.world_size, 5) + 1);
  return options;
}

// Rank 0 reads shards 0, 4 and 5 of one document, rank 1 shards 0..2, rank 2 shards 0, 1, 3, 4.
TEST(QkvRoutingByHand, WindowsMayLeaveGapsInAGroup) {
  QkvPlan plan;
  plan.world_size = 3;
  plan.rank_shard_offsets = {0, 6, 6, 6};
  plan.shard_len = {1, 1, 1, 1, 1, 1};
  plan.q_dst = {0, 2, 1, 2, 2, 0};
  plan.doc_shard_offsets = {0, 6};
  plan.doc_shards = {0, 1, 2, 3, 4, 5};
  plan.kv_begin = {0, 0, 0, 3, 4, 4};
  const QkvRouting got = compute_qkv_routing(plan);
  using Values = std::vector<std::int64_t>;
  // Last queries: rank 0 at 5, rank 2 at 4, rank 1 at 2.
  EXPECT_EQ(plain(got.fwd_kv.copy_offsets), (Values{0, 3, 5, 6, 7, 9, 10}));
  EXPECT_EQ(plain(got.fwd_kv.dst_rank), (Values{0, 2, 1, 2, 1, 1, 2, 0, 2, 0}));
  EXPECT_EQ(plain(got.fwd_kv.dst_offset), (Values{0, 0, 0, 1, 1, 2, 2, 1, 3, 2}));
  EXPECT_EQ(got.fwd_kv.recv.total, (Values{3, 3, 4}));
  EXPECT_EQ(plain(got.attention.shard), (Values{0, 5, 2, 1, 3, 4}));
  EXPECT_EQ(plain(got.attention.kv_row), (Values{0, 1, 0, 0, 2, 3}));
  EXPECT_EQ(plain(got.attention.kv_len), (Values{1, 2, 3, 2, 1, 1}));
  // Rows go back to copy * 6 + shard.
  EXPECT_EQ(plain(got.rev_kv.dst_offset), (Values{0, 4, 5, 12, 7, 2, 6, 1, 3, 10}));
}

TEST(QkvRoutingProperty, PerRankEqualsTheSlowModel) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    check_against_model(test::random_plan(seed, random_options(dice, KvLayout::per_rank, false)));
  });
}

TEST(QkvRoutingProperty, PerRankWithWindowsEqualsTheSlowModel) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    check_against_model(test::random_plan(seed, random_options(dice, KvLayout::per_rank, true)));
  });
}

TEST(QkvRoutingProperty, PerQueryEqualsTheSlowModel) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    check_against_model(test::random_plan(seed, random_options(dice, KvLayout::per_query, false)));
  });
}

TEST(QkvRoutingProperty, PerQueryWithWindowsEqualsTheSlowModel) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    check_against_model(test::random_plan(seed, random_options(dice, KvLayout::per_query, true)));
  });
}

TEST(QkvRoutingProperty, RangesEqualTheSlowModel) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const KvLayout layout = dice.coin() ? KvLayout::per_rank : KvLayout::per_query;
    test::RandomPlanOptions options = random_options(dice, layout, dice.coin());
    options.ends = true;
    check_against_model(test::random_plan(seed, options));
  });
}

TEST(QkvRoutingProperty, FullMasksEqualTheSlowModel) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const KvLayout layout = dice.coin() ? KvLayout::per_rank : KvLayout::per_query;
    test::RandomPlanOptions options = random_options(dice, layout, false);
    options.full = true;
    check_against_model(test::random_plan(seed, options));
  });
}

// Rank 0 reads the whole document once, for shards 1 and 3; rank 1 for shards 0 and 2.
TEST(QkvRoutingByHand, AFullMaskBringsWholeDocuments) {
  QkvPlan plan;
  plan.world_size = 2;
  plan.rank_shard_offsets = {0, 3, 4};
  plan.shard_len = {2, 3, 4, 5};
  plan.q_dst = {1, 0, 1, 0};
  plan.doc_shard_offsets = {0, 4};
  plan.doc_shards = {0, 1, 2, 3};
  plan.need_whole_documents();
  const QkvRouting got = compute_qkv_routing(plan);
  using Values = std::vector<std::int64_t>;
  EXPECT_EQ(plain(got.fwd_kv.dst_rank), (Values{0, 1, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(plain(got.fwd_kv.dst_offset), (Values{0, 0, 2, 2, 5, 5, 9, 9}));
  EXPECT_EQ(plain(got.attention.kv_row), (Values{0, 0, 0, 0}));
  EXPECT_EQ(plain(got.attention.kv_len), (Values{14, 14, 14, 14}));
  plan.kv_layout = KvLayout::per_query;
  const QkvRouting each = compute_qkv_routing(plan);
  EXPECT_EQ(each.fwd_kv.recv.total, (Values{28, 28}));
  EXPECT_EQ(plain(each.attention.kv_row), (Values{0, 14, 0, 14}));
  EXPECT_EQ(plain(each.attention.kv_len), (Values{14, 14, 14, 14}));
}

// Under a causal mask copy c of all shards of a document is on the same rank.
TEST(QkvRoutingProperty, ACopyOfACausalDocumentIsOnOneRank) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const QkvPlan plan = test::random_plan(seed, random_options(dice, KvLayout::per_rank, false));
    const QkvRouting got = compute_qkv_routing(plan);
    std::map<std::pair<std::int64_t, std::int64_t>, std::int32_t> rank_of;  // by document, copy
    const auto places = test::shard_places(plan);
    for (std::size_t s = 0; s < places.size(); ++s) {
      const auto entry = static_cast<std::int64_t>(s);
      for (std::int64_t at = got.fwd_kv.destination_begin(entry);
           at < got.fwd_kv.destination_end(entry); ++at) {
        const std::int32_t rank = got.fwd_kv.dst_rank[static_cast<std::size_t>(at)];
        const std::int64_t copy = at - got.fwd_kv.destination_begin(entry);
        EXPECT_EQ(rank_of.emplace(std::pair{places[s].doc, copy}, rank).first->second, rank);
      }
    }
  });
}

}  // namespace
}  // namespace waybill
