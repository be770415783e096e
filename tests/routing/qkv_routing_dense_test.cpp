// The sparse routing against the dense functions: two code paths that must agree.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "support/difference.h"
#include "support/random_plan.h"
#include "support/seeded.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

using test::Dice;
using test::difference;
using test::for_seeds;

E2eMetadata dense_path(const QkvPlan& plan) {
  const RawQkvDispatch raw = to_raw_dispatch(plan);
  return compute_e2e_metadata(raw.cp_seq_lens, raw.num_cp_shards, raw.cp_query_dst, raw.kv);
}

/// The documented differences of the two forms are none, so the whole structures are compared.
std::string paths_differ(const QkvPlan& plan) {
  return difference(to_dense(compute_qkv_routing(plan)), dense_path(plan));
}

TEST(QkvRoutingDenseProperty, SparseAndDensePathsAgree) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    test::RandomPlanOptions options;
    options.kv_layout = KvLayout::per_query;
    options.world_size = dice.in_range(1, 11);
    options.max_shards_per_rank = dice.in_range<std::int64_t>(0, 8);
    options.documents_stay_on_rank = dice.coin();
    options.zero_length_share = dice.one_of({0.0, 0.1, 1.0});
    options.destinations = dice.in_range(0, options.world_size + 1);
    EXPECT_EQ(paths_differ(test::random_plan(seed, options)), "");
  });
}

TEST(QkvRoutingDense, WorldsUpTo64) {
  for (std::int32_t world_size = 1; world_size <= 64; ++world_size) {
    const QkvPlan plan = test::random_plan(static_cast<std::uint64_t>(world_size),
                                           {.world_size = world_size,
                                            .max_shards_per_rank = 5,
                                            .max_document_shards = 9,
                                            .kv_layout = KvLayout::per_query});
    EXPECT_EQ(paths_differ(plan), "") << world_size;
  }
}

TEST(QkvRoutingDense, APlanOfNothing) {
  QkvPlan plan;
  plan.world_size = 2;
  plan.kv_layout = KvLayout::per_query;
  plan.rank_shard_offsets = {0, 0, 0};
  plan.doc_shard_offsets = {0, 0};
  EXPECT_EQ(paths_differ(plan), "");
  EXPECT_EQ(to_dense(compute_qkv_routing(plan)).fwd_q.dst_rank.shape(), (Shape{2, 0}));
}

TEST(QkvRoutingDense, OneLongDocumentOnOneRank) {
  QkvPlan plan;
  plan.world_size = 1;
  plan.kv_layout = KvLayout::per_query;
  plan.rank_shard_offsets = {0, 40};
  plan.doc_shard_offsets = {0, 40};
  for (std::int32_t s = 0; s < 40; ++s) {
    plan.shard_len.push_back(1 + s % 3);
    plan.q_dst.push_back(0);
    plan.doc_shards.push_back(39 - s);
  }
  EXPECT_EQ(paths_differ(plan), "");
}

// Q does not depend on the layout of KV; of its attention layout only the KV part does.
TEST(QkvRoutingDenseProperty, QIsTheSameInBothLayouts) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    QkvPlan plan = test::random_plan(seed, {.world_size = dice.in_range(1, 9)});
    const E2eMetadata per_rank = to_dense(compute_qkv_routing(plan));
    plan.kv_layout = KvLayout::per_query;
    const E2eMetadata per_query = to_dense(compute_qkv_routing(plan));
    EXPECT_EQ(difference(per_rank.fwd_q, per_query.fwd_q), "");
    EXPECT_EQ(difference(per_rank.rev_q, per_query.rev_q), "");
    const AttnLayout& layout = per_rank.attention;
    EXPECT_EQ(layout.cu_seqlens_q, per_query.attention.cu_seqlens_q);
    EXPECT_EQ(layout.max_seqlen_kv, per_query.attention.max_seqlen_kv);
    EXPECT_EQ(layout.num_local_seqs_recv, per_query.attention.num_local_seqs_recv);
    EXPECT_TRUE(layout.cu_seqlens_kv.empty());
    EXPECT_EQ(std::ssize(layout.kv_row), plan.world_size);
    EXPECT_EQ(std::ssize(layout.kv_len), plan.world_size);
    EXPECT_TRUE(per_query.attention.kv_row.empty());
  });
}

TEST(ComputeE2eMetadata, IsTheThreeFunctionsInOneCall) {
  const QkvPlan plan = test::random_plan(5, {.kv_layout = KvLayout::per_query, .edge_share = 0});
  const RawQkvDispatch raw = to_raw_dispatch(plan);
  const E2eMetadata all =
      compute_e2e_metadata(raw.cp_seq_lens, raw.num_cp_shards, raw.cp_query_dst, raw.kv, true);
  const DispatchMetadata q = compute_metadata(raw.cp_seq_lens, raw.cp_query_dst, true);
  const KvMetadata kv =
      compute_metadata_kv(raw.kv, raw.cp_seq_lens, raw.num_cp_shards, raw.cp_query_dst, true);
  EXPECT_EQ(difference(all.fwd_q, q.fwd), "");
  EXPECT_EQ(difference(all.rev_q, q.rev), "");
  EXPECT_EQ(difference(all.fwd_kv, kv.fwd), "");
  EXPECT_EQ(difference(all.rev_kv, kv.rev), "");
  EXPECT_EQ(difference(all.attention,
                       compute_attn_layout_seqlens(raw.cp_seq_lens, raw.kv.q_to_num_kv_token,
                                                   raw.cp_query_dst, true, true)),
            "");
  ASSERT_TRUE(all.q_intermediates.has_value());
  EXPECT_EQ(all.q_intermediates->seq_to_dst, q.intermediates->seq_to_dst);
  EXPECT_EQ(all.kv_dst_global_seq_id, kv.kv_dst_global_seq_id);
  const E2eMetadata bare =
      compute_e2e_metadata(raw.cp_seq_lens, raw.num_cp_shards, raw.cp_query_dst, raw.kv);
  EXPECT_FALSE(bare.q_intermediates.has_value());
  EXPECT_FALSE(bare.kv_dst_global_seq_id.has_value());
}

}  // namespace
}  // namespace waybill
