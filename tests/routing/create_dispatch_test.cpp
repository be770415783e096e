#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "support/difference.h"
#include "support/expect_error.h"
#include "support/kv_model.h"
#include "support/seeded.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {
namespace {

using test::Dice;
using test::difference;
using test::for_seeds;
using test::rejects;

/// The metadata of a generated plan, computed again from its dense form.
E2eMetadata again(const RawQkvDispatch& raw) {
  return compute_e2e_metadata(raw.cp_seq_lens, raw.num_cp_shards, raw.cp_query_dst, raw.kv);
}

struct Sequence {
  std::vector<std::int64_t> lens;
  std::set<std::int32_t> destinations;
  std::int64_t rank = -1;
};

Sequence sequence_of(const QkvPlan& plan, std::int64_t doc) {
  const auto places = test::shard_places(plan);
  Sequence made;
  for (std::int64_t p = 0; p < test::document_shards(plan, doc); ++p) {
    const std::size_t shard = test::shard_at(plan, doc, p);
    made.lens.push_back(plan.shard_len[shard]);
    made.destinations.insert(plan.q_dst[shard]);
    made.rank = places[shard].rank;
  }
  return made;
}

TEST(CreateRawQkvDispatchProperty, KeepsItsPromises) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const auto world_size = dice.in_range<std::int64_t>(1, 17);
    const auto copies = dice.in_range<std::int64_t>(1, world_size + 1);
    const auto num_seqs = dice.in_range<std::int64_t>(1, 6);
    const auto pieces = dice.in_range<std::int64_t>(0, 60);
    const std::int64_t rows = pieces * copies;
    const auto made = create_raw_qkv_dispatch(world_size, rows, num_seqs, copies, seed);
    const QkvPlan& plan = made.plan;
    plan.check("create_raw_qkv_dispatch");
    EXPECT_EQ(plan.kv_layout, KvLayout::per_query);
    EXPECT_EQ(plan.world_size, world_size);
    EXPECT_EQ(made.seq_lens.shape(), (Shape{world_size, num_seqs}));
    EXPECT_EQ(made.seq_lens.dtype(), DType::int64);
    std::vector<std::int64_t> documents;  // their lengths, of sequences with rows
    for (std::int64_t w = 0; w < world_size; ++w) {
      const std::vector<std::int64_t> lens = made.seq_lens.row(w).to_vector();
      EXPECT_EQ(std::accumulate(lens.begin(), lens.end(), std::int64_t{0}), rows);
      for (const std::int64_t len : lens) {
        EXPECT_EQ(len % copies, 0);
        EXPECT_GE(len, pieces >= num_seqs ? copies : 0);
        if (len > 0) documents.push_back(len);
      }
    }
    std::size_t next = 0;
    std::int64_t rank = 0;
    for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
      const Sequence sequence = sequence_of(plan, d);
      const std::int64_t cp = std::ssize(sequence.lens);
      const std::int64_t len =
          std::accumulate(sequence.lens.begin(), sequence.lens.end(), std::int64_t{0});
      EXPECT_LE(cp, copies);
      EXPECT_EQ(cp & (cp - 1), 0);
      EXPECT_EQ(std::ssize(sequence.destinations), cp);
      const auto [least, most] = std::minmax_element(sequence.lens.begin(), sequence.lens.end());
      if (cp > 0) {
        EXPECT_LE(*most - *least, len % cp == 0 ? 0 : 1);
      }
      if (len == 0) continue;
      EXPECT_EQ(documents.at(next), len);
      EXPECT_GE(sequence.rank, rank);
      rank = sequence.rank;
      ++next;
    }
    EXPECT_EQ(next, documents.size());
  });
}

TEST(CreateRawQkvDispatchProperty, DenseFormIsThatOfThePlan) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const auto world_size = dice.in_range<std::int64_t>(1, 9);
    const auto copies = dice.in_range<std::int64_t>(1, world_size + 1);
    const auto made = create_raw_qkv_dispatch(world_size, 30 * copies, 3, copies, seed);
    EXPECT_TRUE(made.raw == to_raw_dispatch(made.plan, copies));
    EXPECT_EQ(made.raw.kv.kv_to_q_rank.dim(2), copies);
  });
}

TEST(CreateRawQkvDispatch, EveryShardCountIsDrawn) {
  const auto made = create_raw_qkv_dispatch(8, 8 * 1000, 20, 8, 3);
  std::set<std::int64_t> counts;
  std::set<std::int32_t> destinations;
  for (std::int64_t d = 0; d < made.plan.num_documents(); ++d) {
    counts.insert(test::document_shards(made.plan, d));
    destinations.merge(sequence_of(made.plan, d).destinations);
  }
  EXPECT_EQ(counts, (std::set<std::int64_t>{1, 2, 4, 8}));
  EXPECT_EQ(destinations.size(), 8U);
}

// A degree of 3 cuts into 1 or 2; 3 rows in 2 shards are 2 and 1, or 1 and 2.
TEST(CreateRawQkvDispatch, ADegreeThatIsNoPowerOfTwo) {
  bool uneven = false;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto made = create_raw_qkv_dispatch(3, 3, 1, 3, seed);
    for (std::int64_t d = 0; d < made.plan.num_documents(); ++d) {
      const Sequence sequence = sequence_of(made.plan, d);
      EXPECT_LE(sequence.lens.size(), 2U);
      EXPECT_EQ(std::accumulate(sequence.lens.begin(), sequence.lens.end(), std::int64_t{0}), 3);
      uneven = uneven || sequence.lens.size() == 2;
    }
  }
  EXPECT_TRUE(uneven);
}

TEST(CreateRawQkvDispatch, TheSeedDecides) {
  const auto first = create_raw_qkv_dispatch(4, 400, 3, 4, 11);
  EXPECT_EQ(first.plan, create_raw_qkv_dispatch(4, 400, 3, 4, 11).plan);
  EXPECT_NE(first.plan, create_raw_qkv_dispatch(4, 400, 3, 4, 12).plan);
}

TEST(CreateRawQkvDispatch, Errors) {
  const auto call = [](std::int64_t world, std::int64_t rows, std::int64_t n, std::int64_t c) {
    return [=] { (void)create_raw_qkv_dispatch(world, rows, n, c); };
  };
  const char* who = "create_raw_qkv_dispatch";
  EXPECT_TRUE(rejects(call(2, 12, 2, 4), {who, "max_cp_degree = 4", "world_size = 2"}));
  EXPECT_TRUE(rejects(call(4, 10, 2, 4), {who, "total_seq_len = 10", "multiple", "4"}));
  EXPECT_TRUE(rejects(call(0, 12, 2, 1), {who, "world_size = 0"}));
  EXPECT_TRUE(rejects(call(4, 12, 2, 0), {who, "max_cp_degree = 0"}));
  EXPECT_TRUE(rejects(call(4, -12, 2, 4), {who, "total_seq_len = -12"}));
  EXPECT_TRUE(rejects(call(4, 12, 0, 4), {who, "num_seqs = 0"}));
  EXPECT_TRUE(rejects(call(4, std::int64_t{1} << 60, 2, 4), {who, "total_seq_len", "2^31"}));
}

TEST(CreateQkvDispatch, IsTheRawPlanWithItsMetadata) {
  const auto raw = create_raw_qkv_dispatch(4, 400, 3, 4, 11);
  const QkvDispatch all = create_qkv_dispatch(4, 400, 3, 4, 11, true);
  EXPECT_EQ(all.plan, raw.plan);
  EXPECT_EQ(all.raw, raw.raw);
  EXPECT_EQ(all.seq_lens, raw.seq_lens);
  EXPECT_EQ(difference(all.metadata, again(raw.raw)), "");
  EXPECT_TRUE(all.metadata.q_intermediates.has_value());
  EXPECT_TRUE(all.metadata.kv_dst_global_seq_id.has_value());
  const QkvDispatch bare = create_qkv_dispatch(4, 400, 3, 4, 11);
  EXPECT_FALSE(bare.metadata.q_intermediates.has_value());
  EXPECT_FALSE(bare.metadata.kv_dst_global_seq_id.has_value());
  EXPECT_TRUE(rejects([] { (void)create_qkv_dispatch(2, 12, 2, 4); },
                      {"create_qkv_dispatch: max_cp_degree = 4", "world_size = 2"}));
  EXPECT_TRUE(rejects([] { (void)create_qkv_dispatch(4, 10, 2, 4); },
                      {"create_qkv_dispatch: total_seq_len = 10"}));
}

std::vector<std::int32_t> destinations_of_rank(const QkvPlan& plan, std::size_t rank) {
  return {plan.q_dst.begin() + plan.rank_shard_offsets[rank],
          plan.q_dst.begin() + plan.rank_shard_offsets[rank + 1]};
}

TEST(CreateBalancedExample, ShardsAndDestinations) {
  const QkvDispatch example = create_balanced_example();
  const QkvPlan& plan = example.plan;
  EXPECT_EQ(plan.world_size, 4);
  EXPECT_EQ(example.raw.num_cp_shards, IndexArray::vector({8, 2, 4, 8}));
  EXPECT_EQ(destinations_of_rank(plan, 0), (std::vector<std::int32_t>{0, 1, 2, 3, 3, 2, 1, 0}));
  EXPECT_EQ(destinations_of_rank(plan, 1), (std::vector<std::int32_t>{1, 1}));
  EXPECT_EQ(destinations_of_rank(plan, 2), (std::vector<std::int32_t>(4, 2)));
  EXPECT_EQ(destinations_of_rank(plan, 3), (std::vector<std::int32_t>(8, 3)));
  EXPECT_EQ(plan.num_documents(), 15);
  for (std::size_t w = 0; w < 4; ++w) {
    for (std::int64_t s = plan.rank_shard_offsets[w]; s < plan.rank_shard_offsets[w + 1]; ++s) {
      const std::int64_t rows[] = {2048, 8192, 4096, 2048};
      EXPECT_EQ(plan.shard_len[static_cast<std::size_t>(s)], rows[w]);
    }
  }
  EXPECT_EQ(difference(example.metadata, again(example.raw)), "");
}

TEST(CreateRawQkvDispatch, GivenDrawsSayEverything) {
  const auto made = create_raw_qkv_dispatch(
      IndexArray::matrix({{8, 0}, {5, 3}}), IndexArray::matrix({{2, 1}, {1, 2}}),
      IndexArray::cube({{{1, 0}, {0, 9}}, {{0, -5}, {1, 1}}}));
  EXPECT_EQ(made.raw.cp_seq_lens, IndexArray::matrix({{4, 4, 0}, {5, 2, 1}}));
  EXPECT_EQ(made.raw.cp_query_dst, IndexArray::matrix({{1, 0, 0}, {0, 1, 1}}));
  EXPECT_EQ(made.raw.num_cp_shards, IndexArray::vector({3, 3}));
  EXPECT_EQ(made.raw.kv.kv_to_q_rank.dim(2), 2);
  EXPECT_EQ(made.seq_lens, IndexArray::matrix({{8, 0}, {5, 3}}));
}

TEST(CreateRawQkvDispatch, DrawsOfAnyIntegerType) {
  const IndexArray lens = IndexArray::matrix({{8, 0}, {5, 3}});
  const IndexArray cp = IndexArray::matrix({{2, 1}, {1, 2}});
  const IndexArray dst = IndexArray::cube({{{1, 0}, {0, 9}}, {{0, -5}, {1, 1}}});
  const auto made =
      create_raw_qkv_dispatch(lens.to(DType::uint32), cp.to(DType::uint64), dst.to(DType::int32));
  const auto expected = create_raw_qkv_dispatch(lens, cp, dst);
  EXPECT_EQ(made.raw, expected.raw);
  EXPECT_EQ(made.seq_lens, lens);
}

TEST(CreateRawQkvDispatch, RefusesDrawsThatAreNoPlan) {
  const IndexArray lens = IndexArray::matrix({{4}, {4}});
  const IndexArray cp = IndexArray::matrix({{1}, {2}});
  const IndexArray dst = IndexArray::cube({{{1, 0}}, {{0, 1}}});
  const auto call = [](const IndexArray& l, const IndexArray& n, const IndexArray& d) {
    return [=] { (void)create_raw_qkv_dispatch(l, n, d); };
  };
  EXPECT_TRUE(rejects(call(lens, IndexArray::matrix({{1}, {3}}), dst),
                      {"cp_num of rank 1, sequence 0 = 3", "expected 1..2"}));
  EXPECT_TRUE(rejects(call(lens, cp, IndexArray::cube({{{1, 0}}, {{0, 2}}})),
                      {"cp_dst of rank 1, sequence 0, shard 1 = 2", "expected 0..1"}));
  EXPECT_TRUE(rejects(call(IndexArray::matrix({{4}, {-4}}), cp, dst), {"seq_lens", "-4"}));
  EXPECT_TRUE(rejects(call(lens, IndexArray::matrix({{1}}), dst), {"cp_num has shape"}));
  EXPECT_TRUE(rejects(call(lens, cp, lens), {"cp_dst has shape"}));
}

TEST(CreateBalancedExample, TheLongSequenceIsEqualWorkForAll) {
  const QkvPlan plan = create_balanced_example().plan;
  const std::vector<std::int64_t> work = shard_work(plan);
  std::vector<std::int64_t> by_rank(4);
  for (std::size_t s = 0; s < 8; ++s) by_rank[static_cast<std::size_t>(plan.q_dst[s])] += work[s];
  for (const std::int64_t sum : by_rank) EXPECT_EQ(sum, by_rank[0]);
  EXPECT_EQ(by_rank[0] * 4, std::int64_t{16384} * 16385 / 2);
}

TEST(CreateBalancedExample, OtherSizesAndErrors) {
  EXPECT_EQ(create_balanced_example(8).plan.shard_len[0], 1);
  for (const std::int64_t rows : {0, -8, 12, 7}) {
    EXPECT_TRUE(rejects([&] { (void)create_balanced_example(rows); },
                        {"create_balanced_example", "rows_per_rank", std::to_string(rows)}));
  }
}

}  // namespace
}  // namespace waybill
