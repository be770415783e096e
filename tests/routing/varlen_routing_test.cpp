#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "support/random_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

using Names = std::vector<std::int64_t>;  // of rows: document * 2^32 + position

/// The names of each rank's own rows.
std::vector<Names> home_names(const QkvPlan& plan) {
  std::vector<Names> by_shard(plan.num_shards());
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::int64_t position = d << 32;
    for (std::int64_t k = plan.doc_shard_offsets[d]; k < plan.doc_shard_offsets[d + 1]; ++k) {
      const std::size_t shard = plan.doc_shards[k];
      for (std::int64_t i = 0; i < plan.shard_len[shard]; ++i)
        by_shard[shard].push_back(position++);
    }
  }
  std::vector<Names> ranks(plan.world_size);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (auto s = plan.rank_shard_offsets[r]; s < plan.rank_shard_offsets[r + 1]; ++s) {
      const Names& names = by_shard[s];
      ranks[r].insert(ranks[r].end(), names.begin(), names.end());
    }
  }
  return ranks;
}

/// What arrives in each rank's window when all send `rows`; every row is written once.
std::vector<Names> sent(const SparseMetadata& table, const std::vector<Names>& rows) {
  std::vector<Names> windows(table.world_size);
  for (std::size_t r = 0; r < windows.size(); ++r) windows[r].assign(table.recv.total[r], -1);
  for (std::size_t w = 0; w < windows.size(); ++w) {
    std::int64_t row = 0;
    for (auto e = table.rank_offsets[w]; e < table.rank_offsets[w + 1]; ++e) {
      const std::int64_t length = table.seq_len[e];
      for (auto d = table.destination_begin(e); d < table.destination_end(e); ++d) {
        for (std::int64_t i = 0; i < length; ++i) {
          auto& place = windows[table.dst_rank[d]].at(table.dst_offset[d] + i);
          EXPECT_EQ(place, -1);
          place = rows[w].at(row + i);
        }
      }
      row += length;
    }
    EXPECT_EQ(row, std::ssize(rows[w]));
  }
  return windows;
}

Names rows_of(const std::vector<RowRange>& ranges, const Names& all) {
  Names names;
  for (const RowRange& range : ranges)
    names.insert(names.end(), all.begin() + range.begin, all.begin() + range.begin + range.rows);
  return names;
}

/// The keys of a sequence are adjacent tokens of one document, and hold all that its queries need.
void check_sequence(const QkvPlan& plan, const VarlenSequence& s, const Names& q, const Names& kv) {
  ASSERT_GT(s.q_len, 0);
  const std::int64_t first = kv.at(s.kv_begin);
  for (std::int64_t i = 0; i < s.kv_len; ++i) ASSERT_EQ(kv.at(s.kv_begin + i), first + i);
  const std::int64_t query = q.at(s.q_begin);
  for (std::int64_t i = 0; i < s.q_len; ++i) ASSERT_EQ(q.at(s.q_begin + i), query + i);
  const std::int64_t doc = query >> 32;
  EXPECT_EQ(first >> 32, doc);
  std::int64_t position = doc << 32;
  std::vector<std::int64_t> begins;  // of the document's shards
  std::int64_t end_needed = 0;       // position of a shard
  for (auto k = plan.doc_shard_offsets[doc]; k < plan.doc_shard_offsets[doc + 1]; ++k) {
    const std::size_t shard = plan.doc_shards[k];
    begins.push_back(position);
    position += plan.shard_len[shard];
    if (position <= query || plan.shard_len[shard] == 0) continue;
    if (begins.back() >= query + s.q_len) break;
    EXPECT_LE(first, begins[plan.first_needed(static_cast<std::int32_t>(shard))]);
    EXPECT_NE(s.is_whole, plan.is_causal(static_cast<std::int32_t>(shard)));
    end_needed = plan.end_needed(static_cast<std::int32_t>(shard),
                                 static_cast<std::int32_t>(std::ssize(begins) - 1));
  }
  if (!s.is_whole) {
    EXPECT_EQ(first + s.kv_len, query + s.q_len);
    return;
  }
  position = doc << 32;
  for (auto k = plan.doc_shard_offsets[doc]; k < plan.doc_shard_offsets[doc] + end_needed; ++k)
    position += plan.shard_len[plan.doc_shards[k]];
  EXPECT_LE(position, first + s.kv_len);
}

void check(const QkvPlan& plan, const VarlenRouting& routing) {
  const auto home = home_names(plan);
  const auto q_there = sent(routing.fwd_q, home);
  const auto kv_there = sent(routing.fwd_kv, home);
  const auto back = sent(routing.rev_q, q_there);
  std::set<std::int64_t> attended;
  std::vector<Names> shared;
  for (std::size_t r = 0; r < home.size(); ++r) {
    const VarlenRank& rank = routing.ranks[r];
    std::int64_t q_end = 0;
    std::int64_t kv_end = 0;
    std::int64_t whole_kv_end = 0;
    for (const VarlenSequence& s : rank.in_place) {
      check_sequence(plan, s, home[r], home[r]);
      EXPECT_LE(q_end, s.q_begin);
      std::int64_t& keys_end = s.is_whole ? whole_kv_end : kv_end;
      EXPECT_LE(keys_end, s.kv_begin);
      q_end = s.q_begin + s.q_len;
      keys_end = s.kv_begin + s.kv_len;
      attended.insert(home[r].begin() + s.q_begin, home[r].begin() + q_end);
    }
    q_end = kv_end = 0;
    EXPECT_TRUE(std::ranges::is_sorted(rank.dispatched, std::greater{}, &VarlenSequence::is_whole));
    for (const VarlenSequence& s : rank.dispatched) {
      check_sequence(plan, s, q_there[r], kv_there[r]);
      EXPECT_EQ(s.q_begin, q_end);
      EXPECT_EQ(s.kv_begin, kv_end);
      q_end += s.q_len;
      kv_end += s.kv_len;
    }
    EXPECT_EQ(q_end, std::ssize(q_there[r]));
    EXPECT_EQ(kv_end, std::ssize(kv_there[r]));
    for (const std::int64_t name : q_there[r]) EXPECT_TRUE(attended.insert(name).second);
    EXPECT_EQ(back[r], rows_of(rank.q_rows, home[r]));
    shared.push_back(rows_of(rank.kv_rows, home[r]));
  }
  std::size_t rows = 0;
  for (const Names& names : home) rows += names.size();
  EXPECT_EQ(attended.size(), rows);
  EXPECT_EQ(sent(routing.sum_kv, shared), kv_there);
}

TEST(VarlenRouting, ByHand) {
  // Document 0: shards 0, 1 and 2 on rank 0, of which rank 1 attends to the last. Document 1: on
  // rank 1, whole.
  const QkvPlan plan{.world_size = 2,
                     .kv_layout = KvLayout::per_query,
                     .rank_shard_offsets = {0, 3, 4},
                     .shard_len = {4, 2, 3, 5},
                     .q_dst = {0, 0, 1, 1},
                     .doc_shard_offsets = {0, 3, 4},
                     .doc_shards = {0, 1, 2, 3},
                     .kv_begin = {}};
  const VarlenRouting routing = compute_varlen_routing(plan);
  EXPECT_EQ(routing.ranks[0].in_place, (std::vector<VarlenSequence>{{0, 6, 0, 6}}));
  EXPECT_EQ(routing.ranks[0].q_rows, (std::vector<RowRange>{{6, 3}}));
  EXPECT_EQ(routing.ranks[0].kv_rows, (std::vector<RowRange>{{0, 9}}));
  EXPECT_EQ(routing.ranks[1].in_place, (std::vector<VarlenSequence>{{0, 5, 0, 5}}));
  EXPECT_EQ(routing.ranks[1].dispatched, (std::vector<VarlenSequence>{{0, 3, 0, 9}}));
  EXPECT_TRUE(routing.ranks[1].kv_rows.empty());
  check(plan, routing);

  const VarlenRouting all = compute_varlen_routing(plan, false);
  EXPECT_TRUE(all.ranks[0].in_place.empty());
  EXPECT_EQ(all.ranks[0].dispatched, (std::vector<VarlenSequence>{{0, 6, 0, 6}}));
  check(plan, all);
}

TEST(VarlenRouting, ContextsThatOverlapAreNotBothInPlace) {
  // The middle of a document goes away: its beginning and its end would both begin at row 0.
  const QkvPlan plan{.world_size = 2,
                     .kv_layout = KvLayout::per_query,
                     .rank_shard_offsets = {0, 3, 3},
                     .shard_len = {4, 2, 3},
                     .q_dst = {0, 1, 0},
                     .doc_shard_offsets = {0, 3},
                     .doc_shards = {0, 1, 2},
                     .kv_begin = {}};
  const VarlenRouting routing = compute_varlen_routing(plan);
  EXPECT_EQ(routing.ranks[0].in_place, (std::vector<VarlenSequence>{{6, 3, 0, 9}}));
  EXPECT_EQ(routing.ranks[0].dispatched, (std::vector<VarlenSequence>{{0, 4, 0, 4}}));
  check(plan, routing);
}

TEST(VarlenRouting, QueriesThatNeedNoKeyBeforeThemselvesAreASequence) {
  // One document of chunks [0, 6) and [6, 11), all on rank 0, which attends to it but for the end.
  const QkvPlan plan{.world_size = 2,
                     .kv_layout = KvLayout::per_query,
                     .rank_shard_offsets = {0, 4, 4},
                     .shard_len = {4, 2, 3, 2},
                     .q_dst = {0, 0, 0, 1},
                     .doc_shard_offsets = {0, 4},
                     .doc_shards = {0, 1, 2, 3},
                     .kv_begin = {0, 0, 2, 2}};
  const VarlenRouting routing = compute_varlen_routing(plan);
  EXPECT_EQ(routing.ranks[0].in_place, (std::vector<VarlenSequence>{{0, 6, 0, 6}, {6, 3, 6, 3}}));
  EXPECT_EQ(routing.ranks[1].dispatched, (std::vector<VarlenSequence>{{0, 2, 0, 5}}));
  check(plan, routing);
  const VarlenRouting all = compute_varlen_routing(plan, false);
  EXPECT_EQ(all.ranks[0].dispatched, (std::vector<VarlenSequence>{{0, 6, 0, 6}, {6, 3, 6, 3}}));
  check(plan, all);
}

TEST(VarlenRouting, AttendsToAPrefixByItself) {
  // A document with a prefix of 6 tokens, [0, 4) and [4, 6), of which rank 1 attends to the end.
  const QkvPlan plan{.world_size = 2,
                     .kv_layout = KvLayout::per_query,
                     .rank_shard_offsets = {0, 4, 4},
                     .shard_len = {4, 2, 3, 2},
                     .q_dst = {0, 0, 0, 1},
                     .doc_shard_offsets = {0, 4},
                     .doc_shards = {0, 1, 2, 3},
                     .kv_begin = {},
                     .kv_end = {2, 2, 0, 0}};
  const VarlenRouting routing = compute_varlen_routing(plan);
  EXPECT_EQ(routing.ranks[0].in_place,
            (std::vector<VarlenSequence>{{0, 6, 0, 6, true}, {6, 3, 0, 9, false}}));
  EXPECT_EQ(routing.ranks[1].dispatched, (std::vector<VarlenSequence>{{0, 2, 0, 11, false}}));
  EXPECT_DOUBLE_EQ(in_place_share(routing), (36 + 3 * 7.5) / (36 + 3 * 7.5 + 2 * 10));
  check(plan, routing);
  const VarlenRouting all = compute_varlen_routing(plan, false);
  EXPECT_EQ(all.ranks[0].dispatched,
            (std::vector<VarlenSequence>{{0, 6, 0, 6, true}, {6, 3, 6, 9, false}}));
  check(plan, all);
}

TEST(VarlenRouting, ServesEveryQueryOfRandomPlans) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    test::RandomPlanOptions options;
    options.world_size = static_cast<std::int32_t>(1 + seed % 4);
    options.windows = seed % 3 == 0;
    options.full = seed % 5 == 0;
    options.prefixes = seed % 5 > 2;
    options.documents_stay_on_rank = seed % 2 == 0;
    const QkvPlan plan = test::random_plan(seed, options);
    check(plan, compute_varlen_routing(plan, true));
    check(plan, compute_varlen_routing(plan, false));
  }
}

}  // namespace
}  // namespace waybill
