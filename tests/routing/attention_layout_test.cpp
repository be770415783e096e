#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support/difference.h"
#include "support/expect_error.h"
#include "support/seeded.h"
#include "support/slow_model.h"
#include "waybill/routing/compute_metadata.h"

namespace waybill {
namespace {

using test::Dice;
using test::difference;
using test::for_seeds;
using test::rejects;

// Rank 2 gets nothing; rank 0 gets (0, 0), (1, 1), rank 1 gets (0, 2), (1, 0), (2, 0).
const IndexArray len = IndexArray::matrix({{3, 0, 2}, {4, 1, 0}, {6, 0, 0}});
const IndexArray context = IndexArray::matrix({{3, 0, 9}, {4, 8, 0}, {7, 0, 0}});
const IndexArray dispatch = IndexArray::matrix({{0, -1, 1}, {1, 0, -1}, {1, -1, -1}});

AttnLayout expected_common() {
  AttnLayout layout;
  layout.max_seqlen_q = IndexArray::vector({3, 6, 0});
  layout.max_seqlen_kv = IndexArray::vector({8, 9, 0});
  layout.num_local_seqs_recv = IndexArray::vector({2, 3, 0});
  return layout;
}

TEST(AttnLayoutTest, PaddedWithLeadingZero) {
  AttnLayout expected = expected_common();
  expected.cu_seqlens_q = {IndexArray::matrix({{0, 3, 4, 4}, {0, 2, 6, 12}, {0, 0, 0, 0}})};
  expected.cu_seqlens_kv = {IndexArray::matrix({{0, 3, 11, 11}, {0, 9, 13, 20}, {0, 0, 0, 0}})};
  EXPECT_EQ(difference(compute_attn_layout_seqlens(len, context, dispatch), expected), "");
}

TEST(AttnLayoutTest, PaddedWithoutLeadingZero) {
  AttnLayout expected = expected_common();
  expected.cu_seqlens_q = {IndexArray::matrix({{3, 4, 4}, {2, 6, 12}, {0, 0, 0}})};
  expected.cu_seqlens_kv = {IndexArray::matrix({{3, 11, 11}, {9, 13, 20}, {0, 0, 0}})};
  EXPECT_EQ(difference(compute_attn_layout_seqlens(len, context, dispatch, false), expected), "");
}

TEST(AttnLayoutTest, RaggedWithLeadingZero) {
  AttnLayout expected = expected_common();
  expected.cu_seqlens_q = {IndexArray::vector({0, 3, 4}), IndexArray::vector({0, 2, 6, 12}),
                           IndexArray::vector({0})};
  expected.cu_seqlens_kv = {IndexArray::vector({0, 3, 11}), IndexArray::vector({0, 9, 13, 20}),
                            IndexArray::vector({0})};
  EXPECT_EQ(difference(compute_attn_layout_seqlens(len, context, dispatch, true, true), expected),
            "");
}

TEST(AttnLayoutTest, RaggedWithoutLeadingZero) {
  AttnLayout expected = expected_common();
  expected.cu_seqlens_q = {IndexArray::vector({3, 4}), IndexArray::vector({2, 6, 12}),
                           IndexArray(Shape{0})};
  expected.cu_seqlens_kv = {IndexArray::vector({3, 11}), IndexArray::vector({9, 13, 20}),
                            IndexArray(Shape{0})};
  EXPECT_EQ(difference(compute_attn_layout_seqlens(len, context, dispatch, false, true), expected),
            "");
}

TEST(AttnLayoutTest, NothingAnywhere) {
  const AttnLayout layout = compute_attn_layout_seqlens(
      IndexArray(Shape{2, 0}), IndexArray(Shape{2, 0}), IndexArray(Shape{2, 0}));
  EXPECT_EQ(layout.cu_seqlens_q, std::vector{IndexArray(Shape{2, 1})});
  EXPECT_EQ(layout.num_local_seqs_recv, IndexArray(Shape{2}));
  EXPECT_EQ(layout.max_seqlen_kv, IndexArray(Shape{2}));
  const AttnLayout bare = compute_attn_layout_seqlens(
      IndexArray(Shape{2, 1}), IndexArray(Shape{2, 1}), IndexArray::full({2, 1}, -1), false);
  EXPECT_EQ(bare.cu_seqlens_q, std::vector{IndexArray(Shape{2, 0})});
}

TEST(AttnLayoutTest, TablesOfAnyIntegerType) {
  EXPECT_EQ(compute_attn_layout_seqlens(len.to(DType::uint32), context.to(DType::uint64),
                                        dispatch.to(DType::int32)),
            compute_attn_layout_seqlens(len, context, dispatch));
}

TEST(AttnLayoutTest, Errors) {
  const auto call = [](const IndexArray& a, const IndexArray& b, const IndexArray& c) {
    return [&] { (void)compute_attn_layout_seqlens(a, b, c); };
  };
  const IndexArray small(Shape{3, 2});
  EXPECT_TRUE(rejects(call(IndexArray(Shape{3}), context, dispatch),
                      {"compute_attn_layout_seqlens", "seq_shard_len", "[3]"}));
  EXPECT_TRUE(rejects(call(len, small, dispatch), {"seq_shard_cumsum", "[3, 2]", "[3, 3]"}));
  EXPECT_TRUE(rejects(call(len, context, small), {"dispatch", "[3, 2]", "[3, 3]"}));
  EXPECT_TRUE(rejects(call(len, context, dispatch.reshaped({3, 3, 1})), {"dispatch", "[3, 3, 1]"}));
  EXPECT_TRUE(rejects(call(IndexArray(len.shape(), DType::boolean), context, dispatch),
                      {"seq_shard_len", "bool", "integers"}));
  IndexArray bad = dispatch;
  test::element(bad, {1, 2}) = 3;
  EXPECT_TRUE(rejects(call(len, context, bad), {"dispatch", "rank 1", " = 3"}));
  test::element(bad, {1, 2}) = -2;
  EXPECT_TRUE(rejects(call(len, context, bad), {"dispatch", "rank 1", " = -2"}));
  bad = len;
  test::element(bad, {2, 0}) = -6;
  EXPECT_TRUE(rejects(call(bad, context, dispatch), {"seq_shard_len", "rank 2", "-6"}));
  EXPECT_TRUE(rejects(call(len, bad, dispatch), {"seq_shard_cumsum", "rank 2", "-6"}));
  EXPECT_TRUE(
      rejects(call(IndexArray(Shape{0, 2}), IndexArray(Shape{0, 2}), IndexArray(Shape{0, 2})),
              {"world_size", "0"}));
}

TEST(AttnLayoutProperty, EachRankListsItsShardsInTheGlobalOrder) {
  for_seeds([](Dice& dice) {
    const auto world_size = dice.in_range<std::int64_t>(1, 9);
    const Shape shape{world_size, dice.in_range<std::int64_t>(0, 6)};
    IndexArray rows(shape);
    IndexArray kv_rows(shape);
    IndexArray to = IndexArray::full(shape, -1);
    for (std::size_t i = 0; i < rows.i64().size(); ++i) {
      rows.i64()[i] = dice.below(9);
      kv_rows.i64()[i] = rows.i64()[i] + dice.below(30);
      to.i64()[i] = dice.below(world_size + 1) - 1;
    }
    std::vector<std::vector<std::int64_t>> q(static_cast<std::size_t>(world_size), {0});
    std::vector<std::vector<std::int64_t>> kv = q;
    AttnLayout expected;
    expected.max_seqlen_q = IndexArray(Shape{world_size});
    expected.max_seqlen_kv = IndexArray(Shape{world_size});
    expected.num_local_seqs_recv = IndexArray(Shape{world_size});
    for (std::size_t i = 0; i < rows.i64().size(); ++i) {
      if (to.i64()[i] < 0) continue;
      const auto r = static_cast<std::size_t>(to.i64()[i]);
      q[r].push_back(q[r].back() + rows.i64()[i]);
      kv[r].push_back(kv[r].back() + kv_rows.i64()[i]);
      expected.max_seqlen_q.i64()[r] = std::max(expected.max_seqlen_q.i64()[r], rows.i64()[i]);
      expected.max_seqlen_kv.i64()[r] = std::max(expected.max_seqlen_kv.i64()[r], kv_rows.i64()[i]);
      expected.num_local_seqs_recv.i64()[r] += 1;
    }
    for (std::size_t r = 0; r < q.size(); ++r) {
      const auto size = static_cast<std::int64_t>(q[r].size());
      expected.cu_seqlens_q.emplace_back(Shape{size}, q[r]);
      expected.cu_seqlens_kv.emplace_back(Shape{size}, kv[r]);
    }
    EXPECT_EQ(difference(compute_attn_layout_seqlens(rows, kv_rows, to, true, true), expected), "");
  });
}

/// Lengths of KV contexts overlap, so their sum has no bound but that of the numbers.
TEST(AttnLayoutTest, SumsBeyond63BitsAreRefused) {
  const std::int64_t num = (std::int64_t{1} << 23) + 1;
  const IndexArray zeros({1, num});
  const IndexArray contexts = IndexArray::full({1, num}, std::int64_t{1} << 40);
  EXPECT_TRUE(
      rejects([&] { (void)compute_attn_layout_seqlens(zeros, contexts, zeros, true, true); },
              {"compute_attn_layout_seqlens", "exceeds 2^63 - 1"}));
}

TEST(MlpLayout, PrefixSumsAndMaximum) {
  const PackedSeqParams params = mlp_layout_packed_params(IndexArray::vector({4, 1, 7, 0}));
  EXPECT_EQ(params.qkv_format, "thd");
  EXPECT_EQ(params.cu_seqlens_q, IndexArray::vector({0, 4, 5, 12, 12}));
  EXPECT_EQ(params.cu_seqlens_kv, params.cu_seqlens_q);
  EXPECT_EQ(params.max_seqlen_q, 7);
  EXPECT_EQ(params.max_seqlen_kv, 7);
}

TEST(MlpLayout, NoSequencesAndOtherDtypes) {
  const PackedSeqParams none = mlp_layout_packed_params(IndexArray(Shape{0}));
  EXPECT_EQ(none.cu_seqlens_q, IndexArray::vector({0}));
  EXPECT_EQ(none.cu_seqlens_kv, IndexArray::vector({0}));
  EXPECT_EQ(none.max_seqlen_q, 0);
  const PackedSeqParams small =
      mlp_layout_packed_params(IndexArray::vector({2, 3}).to(DType::int32));
  EXPECT_EQ(small.cu_seqlens_q, IndexArray::vector({0, 2, 5}));
}

TEST(MlpLayout, Errors) {
  EXPECT_TRUE(rejects(
      [] {
        (void)mlp_layout_packed_params(IndexArray(Shape{2, 2}));
      },
      {"mlp_layout_packed_params", "seq_lens", "[2, 2]"}));
  EXPECT_TRUE(rejects(
      [] {
        (void)mlp_layout_packed_params(IndexArray::vector({3, -2}));
      },
      {"mlp_layout_packed_params", "seq_lens", "-2"}));
}

}  // namespace
}  // namespace waybill
