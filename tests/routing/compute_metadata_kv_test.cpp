#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "support/difference.h"
#include "support/kv_model.h"
#include "support/random_plan.h"
#include "support/seeded.h"
#include "support/slow_model.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

using test::Dice;
using test::difference;
using test::for_seeds;
using test::KvCase;

// Document A is shard (0, 0) and then shard (1, 0): its queries and KV lie on two ranks.
// Document B is shard (0, 1).
TEST(ComputeMetadataKv, ADocumentAcrossRanksByHand) {
  const IndexArray len = IndexArray::matrix({{3, 2}, {4, 0}});
  KvMapping mapping;
  mapping.kv_to_q_mapping =
      IndexArray(Shape{2, 2, 2, 2}, {0, 0, 1, 0, 0, 1, -1, -1, 1, 0, -1, -1, -1, -1, -1, -1});
  mapping.kv_to_q_rank = IndexArray::cube({{{0, 0}, {0, -1}}, {{1, -1}, {-1, -1}}});
  mapping.kv_context_size = IndexArray::matrix({{0, 0}, {3, 0}});
  mapping.q_to_num_kv_seq = IndexArray::matrix({{1, 1}, {2, 0}});
  mapping.q_to_num_kv_token = IndexArray::matrix({{3, 2}, {7, 0}});
  const KvMetadata got = compute_metadata_kv(mapping, len, IndexArray::vector({2, 1}),
                                             IndexArray::matrix({{1, 1}, {0, -1}}), true);

  Metadata fwd;
  fwd.dst_rank = IndexArray::cube({{{1, 0}, {1, -1}}, {{0, -1}, {-1, -1}}});
  fwd.dst_offset = IndexArray::cube({{{0, 0}, {3, 0}}, {{3, 0}, {0, 0}}});
  fwd.seq_len = len;
  // By the KV shard's own rank; by the query's rank (DistCA) row 0 would be 0, 7, 7.
  fwd.num_recv_tokens = IndexArray::matrix({{3, 4, 7}, {5, 0, 5}});
  fwd.num_seqs = IndexArray::vector({2, 1});
  fwd.world_size = 2;
  fwd.num_total_recv_tokens = {7, 5};
  EXPECT_EQ(difference(got.fwd, fwd), "");

  Metadata rev;
  rev.dst_rank = IndexArray::matrix({{0, 1}, {0, 0}});
  rev.dst_offset = IndexArray::matrix({{5, 0}, {0, 3}});
  rev.seq_len = IndexArray::matrix({{3, 4}, {3, 2}});
  rev.num_recv_tokens = IndexArray::matrix({{3, 5, 8}, {4, 0, 4}});
  rev.num_seqs = IndexArray::vector({2, 2});
  rev.world_size = 2;
  rev.num_total_recv_tokens = {8, 4};
  rev.seq_recv_mask = IndexArray::cube({{{1, 1}, {1, 0}}, {{1, 0}, {0, 0}}}).to(DType::boolean);
  rev.recv_seq_lens = len;
  EXPECT_EQ(difference(got.rev, rev), "");

  EXPECT_EQ(difference("kv_dst_global_seq_id", got.kv_dst_global_seq_id,
                       IndexArray::cube({{{2, 0}, {3, -1}}, {{1, -1}, {-1, -1}}})),
            "");
}

std::string differs_from_model(const QkvPlan& plan, const KvCase& dense) {
  const auto sends = test::model_kv_sends(plan, dense);
  const std::int64_t copies = dense.mapping.kv_to_q_rank.dim(2);
  const KvMetadata got =
      compute_metadata_kv(dense.mapping, dense.seq_len, dense.num_seqs, dense.q_dispatch, true);
  const Metadata rev = test::model_reverse(dense.seq_len, copies, sends, test::Counted::all);
  IndexArray ids = IndexArray::full(dense.mapping.kv_to_q_rank.shape(), -1);
  std::vector<std::int64_t> slot(static_cast<std::size_t>(plan.world_size));
  for (const test::Sent& sent : sends) {
    test::element(ids, {sent.src, sent.shard, sent.copy}) =
        sent.dst * rev.dst_rank.dim(1) + slot[static_cast<std::size_t>(sent.dst)]++;
  }
  return difference(got.fwd, test::model_forward(dense.seq_len, copies, sends, dense.num_seqs)) +
         difference(got.rev, rev) +
         difference("kv_dst_global_seq_id", got.kv_dst_global_seq_id, ids);
}

test::RandomPlanOptions random_options(Dice& dice) {
  test::RandomPlanOptions options;
  options.world_size = dice.in_range(1, 9);
  options.max_shards_per_rank = dice.in_range<std::int64_t>(0, 7);
  options.documents_stay_on_rank = dice.coin();
  return options;
}

TEST(ComputeMetadataKvProperty, EqualsTheSlowModelForAnyCopyOrder) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const QkvPlan plan = test::random_plan(seed, random_options(dice));
    Random random(seed + 1);
    const KvCase dense = test::kv_case(plan, dice.in_range<std::int64_t>(0, 3), &random);
    EXPECT_EQ(differs_from_model(plan, dense), "");
  });
}

TEST(ComputeMetadataKvProperty, ReverseEntryComesFromItsGlobalSequence) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const QkvPlan plan = test::random_plan(seed, random_options(dice));
    const KvCase dense = test::kv_case(plan, 0, nullptr);
    const KvMetadata got =
        compute_metadata_kv(dense.mapping, dense.seq_len, dense.num_seqs, dense.q_dispatch, true);
    const IndexArray& ids = *got.kv_dst_global_seq_id;
    for (std::int64_t i = 0; i < ids.size(); ++i) {
      const std::int64_t id = ids.flat_at(i);
      EXPECT_EQ(id < 0, got.fwd.dst_rank.flat_at(i) < 0);
      if (id < 0) continue;
      EXPECT_EQ(id / got.rev.dst_rank.dim(1), got.fwd.dst_rank.flat_at(i));
      EXPECT_EQ(got.rev.seq_len.flat_at(id), dense.seq_len.flat_at(i / ids.dim(2)));
    }
  });
}

TEST(ComputeMetadataKvModel, WorldsUpTo64) {
  for (std::int32_t world_size = 1; world_size <= 64; ++world_size) {
    const QkvPlan plan = test::random_plan(7 + static_cast<std::uint64_t>(world_size),
                                           {.world_size = world_size, .max_shards_per_rank = 4});
    EXPECT_EQ(differs_from_model(plan, test::kv_case(plan, 1, nullptr)), "") << world_size;
  }
}

// DistCA reads its query table at -(S + 1) for unused copies, out of bounds for one rank.
TEST(ComputeMetadataKv, OneRankWithUnusedCopies) {
  KvMapping mapping;
  mapping.kv_to_q_mapping = IndexArray(Shape{1, 1, 2, 2}, {0, 0, -1, -1});
  mapping.kv_to_q_rank = IndexArray::cube({{{0, -1}}});
  mapping.kv_context_size = IndexArray::matrix({{0}});
  mapping.q_to_num_kv_seq = IndexArray::matrix({{1}});
  mapping.q_to_num_kv_token = IndexArray::matrix({{5}});
  const KvMetadata got = compute_metadata_kv(mapping, IndexArray::matrix({{5}}),
                                             IndexArray::vector({1}), IndexArray::matrix({{0}}));
  EXPECT_EQ(got.fwd.dst_rank, IndexArray::cube({{{0, -1}}}));
  EXPECT_EQ(got.fwd.dst_offset, IndexArray::cube({{{0, 0}}}));
  EXPECT_EQ(got.fwd.num_recv_tokens, IndexArray::matrix({{5, 5}}));
  EXPECT_EQ(got.rev.dst_offset, IndexArray::matrix({{0}}));
  EXPECT_EQ(got.rev.seq_recv_mask, IndexArray::cube({{{1, 0}}}).to(DType::boolean));
  EXPECT_FALSE(got.kv_dst_global_seq_id.has_value());
}

TEST(ComputeMetadataKv, NothingToSend) {
  KvMapping mapping;
  mapping.kv_to_q_mapping = IndexArray::full({2, 0, 3, 2}, -1);
  mapping.kv_to_q_rank = IndexArray(Shape{2, 0, 3});
  mapping.kv_context_size = IndexArray(Shape{2, 0});
  mapping.q_to_num_kv_seq = IndexArray(Shape{2, 0});
  mapping.q_to_num_kv_token = IndexArray(Shape{2, 0});
  const KvMetadata got = compute_metadata_kv(mapping, IndexArray(Shape{2, 0}), IndexArray(Shape{2}),
                                             IndexArray(Shape{2, 0}), true);
  EXPECT_EQ(got.fwd.dst_rank, IndexArray(Shape{2, 0, 3}));
  EXPECT_EQ(got.rev.dst_rank, IndexArray(Shape{2, 0}));
  EXPECT_EQ(got.rev.num_seqs, IndexArray(Shape{2}));
  EXPECT_EQ(got.rev.num_total_recv_tokens, (std::vector<std::int64_t>{0, 0}));
  EXPECT_EQ(got.kv_dst_global_seq_id, IndexArray(Shape{2, 0, 3}));
}

// The dense form of a plan against the one that the model builds by itself.
TEST(ToRawDispatchProperty, EqualsTheSlowModel) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const QkvPlan plan = test::random_plan(seed, random_options(dice));
    const std::int64_t spare = dice.in_range<std::int64_t>(0, 4);
    const KvCase dense = test::kv_case(plan, spare, nullptr);
    const RawQkvDispatch raw = to_raw_dispatch(plan, dense.mapping.kv_to_q_rank.dim(2));
    EXPECT_EQ(difference("cp_seq_lens", raw.cp_seq_lens, dense.seq_len), "");
    EXPECT_EQ(difference("num_cp_shards", raw.num_cp_shards, dense.num_seqs), "");
    EXPECT_EQ(difference("cp_query_dst", raw.cp_query_dst, dense.q_dispatch), "");
    EXPECT_EQ(difference("mapping", raw.kv.kv_to_q_mapping, dense.mapping.kv_to_q_mapping), "");
    EXPECT_EQ(difference("rank", raw.kv.kv_to_q_rank, dense.mapping.kv_to_q_rank), "");
    EXPECT_EQ(difference("context", raw.kv.kv_context_size, dense.mapping.kv_context_size), "");
    EXPECT_EQ(difference("num_kv", raw.kv.q_to_num_kv_seq, dense.mapping.q_to_num_kv_seq), "");
    EXPECT_EQ(difference("rows", raw.kv.q_to_num_kv_token, dense.mapping.q_to_num_kv_token), "");
    if (spare == 0) {
      EXPECT_TRUE(to_raw_dispatch(plan) == raw);
    }
  });
}

}  // namespace
}  // namespace waybill
