#include <gtest/gtest.h>

#include <algorithm>

#include "support/expect_error.h"
#include "support/random_plan.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

using test::rejects;

TEST(ToSparse, IsTheInverseOfToDense) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    for (const KvLayout layout : {KvLayout::per_query, KvLayout::per_rank}) {
      QkvPlan plan =
          test::random_plan(seed, {.world_size = static_cast<std::int32_t>(1 + seed % 9)});
      plan.kv_layout = layout;
      const QkvRouting routing = compute_qkv_routing(plan);
      EXPECT_EQ(to_sparse(plan, to_dense(routing)), routing) << "seed " << seed;
    }
  }
}

TEST(ToSparse, ReadsTheNormalisedForm) {
  const QkvRouting routing =
      compute_qkv_routing(test::random_plan(3, {.world_size = 4, .edge_share = 0}));
  EXPECT_EQ(to_sparse(to_dense(routing.fwd_kv).normalize_dtype()), routing.fwd_kv);
}

TEST(ToSparse, DropsPaddingInTheMiddle) {
  const Metadata fwd = compute_metadata(IndexArray::matrix({{5, 0, 7}, {0, 0, 2}}),
                                        IndexArray::matrix({{1, -1, 0}, {-1, -1, 1}}))
                           .fwd;
  const SparseMetadata sparse = to_sparse(fwd);
  EXPECT_EQ(sparse.rank_offsets, (std::vector<std::int64_t>{0, 2, 3}));
  EXPECT_TRUE(std::ranges::equal(sparse.seq_len, std::vector{5, 7, 2}));
  EXPECT_TRUE(std::ranges::equal(sparse.dst_rank, std::vector{1, 0, 1}));
  EXPECT_TRUE(std::ranges::equal(sparse.dst_offset, std::vector{0, 0, 5}));
  EXPECT_TRUE(sparse.copy_offsets.empty());
}

TEST(ToSparse, KeepsRowsThatStayBehind) {
  const Metadata fwd = compute_metadata(IndexArray::matrix({{5, 7}}), IndexArray::matrix({{-1, 0}}),
                                        false, Undispatched::keep)
                           .fwd;
  const SparseMetadata sparse = to_sparse(fwd);
  EXPECT_TRUE(std::ranges::equal(sparse.seq_len, std::vector{5, 7}));
  EXPECT_TRUE(std::ranges::equal(sparse.copy_offsets, std::vector{0, 0, 1}));
}

TEST(ToSparse, RefusesWhatItCannotRead) {
  const QkvPlan plan = test::random_plan(1, {.world_size = 3, .edge_share = 0});
  const E2eMetadata dense = to_dense(compute_qkv_routing(plan));
  EXPECT_TRUE(rejects([&] { return to_sparse(dense.fwd_q.get_slice(Rank{0})); }, {"to_sparse"}));
  Metadata bad = dense.fwd_q;
  bad.dst_rank.i64()[0] = 3;
  EXPECT_TRUE(rejects([&] { return to_sparse(bad); }, {"dst_rank has 3", "expected -1..2"}));
  bad = dense.fwd_q;
  bad.seq_len.i64()[0] = -4;
  EXPECT_TRUE(rejects([&] { return to_sparse(bad); }, {"seq_len has -4"}));
  E2eMetadata other = dense;
  other.attention.cu_seqlens_q.pop_back();
  EXPECT_TRUE(rejects([&] { return to_sparse(plan, other); }, {"2 ranks of cu_seqlens_q"}));
  other = dense;
  other.attention.kv_len[0] = IndexArray({99});
  EXPECT_TRUE(rejects([&] { return to_sparse(plan, other); }, {"kv_len of rank 0", "[99]"}));
}

}  // namespace
}  // namespace waybill
