#include "waybill/routing/compute_metadata.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "support/difference.h"

namespace waybill {
namespace {

using test::difference;

const IndexArray documented_len = IndexArray::matrix({{10, 5, 0}, {8, 12, 4}, {6, 0, 9}});
const IndexArray documented_dispatch = IndexArray::matrix({{1, 2, -1}, {2, 0, 1}, {0, -1, 2}});

Metadata documented_fwd() {
  Metadata fwd;
  fwd.dst_rank = documented_dispatch;
  fwd.dst_offset = IndexArray::matrix({{0, 0, 0}, {5, 0, 10}, {12, 0, 13}});
  fwd.seq_len = documented_len;
  fwd.num_recv_tokens = IndexArray::matrix({{0, 12, 6, 18}, {10, 4, 0, 14}, {5, 8, 9, 22}});
  fwd.num_seqs = IndexArray::vector({2, 3, 2});
  fwd.world_size = 3;
  fwd.num_total_recv_tokens = {18, 14, 22};
  return fwd;
}

Metadata documented_rev() {
  Metadata rev;
  rev.dst_rank = IndexArray::matrix({{1, 2, -1}, {0, 1, -1}, {0, 1, 2}});
  rev.dst_offset = IndexArray::matrix({{8, 0, 0}, {0, 20, 0}, {10, 0, 6}});
  rev.seq_len = IndexArray::matrix({{12, 6, 0}, {10, 4, 0}, {5, 8, 9}});
  rev.num_recv_tokens = IndexArray::matrix({{0, 10, 5, 15}, {12, 4, 8, 24}, {6, 0, 9, 15}});
  rev.num_seqs = IndexArray::vector({2, 2, 3});
  rev.world_size = 3;
  rev.num_total_recv_tokens = {15, 24, 15};
  return rev;
}

TEST(ComputeMetadata, DocumentedExampleIn2D) {
  const DispatchMetadata got = compute_metadata(documented_len, documented_dispatch);
  EXPECT_EQ(difference(got.fwd, documented_fwd()), "");
  EXPECT_EQ(difference(got.rev, documented_rev()), "");
  EXPECT_FALSE(got.intermediates.has_value());
}

TEST(ComputeMetadata, DocumentedExampleIn3D) {
  const Shape cube{3, 3, 1};
  Metadata fwd = documented_fwd();
  fwd.dst_rank = fwd.dst_rank.reshaped(cube);
  fwd.dst_offset = fwd.dst_offset.reshaped(cube);
  Metadata rev = documented_rev();
  rev.seq_recv_mask = IndexArray(cube, {1, 1, 0, 1, 1, 1, 1, 0, 1}).to(DType::boolean);
  rev.recv_seq_lens = documented_len;
  const DispatchMetadata got = compute_metadata(documented_len, documented_dispatch.reshaped(cube));
  EXPECT_EQ(difference(got.fwd, fwd), "");
  EXPECT_EQ(difference(got.rev, rev), "");
}

TEST(ComputeMetadata, IntermediatesOfTheDocumentedExample) {
  const DispatchMetadata got = compute_metadata(documented_len, documented_dispatch, true);
  ASSERT_TRUE(got.intermediates.has_value());
  const IndexArray one_hot(Shape{3, 3, 1, 3}, {0, 1, 0, 0, 0, 1, 0, 0, 0,  //
                                               0, 0, 1, 1, 0, 0, 0, 1, 0,  //
                                               1, 0, 0, 0, 0, 0, 0, 0, 1});
  const IndexArray tokens(Shape{3, 3, 1, 3}, {0, 10, 0, 0,  0, 5, 0, 0, 0,  //
                                              0, 0,  8, 12, 0, 0, 0, 4, 0,  //
                                              6, 0,  0, 0,  0, 0, 0, 0, 9});
  EXPECT_EQ(difference("seq_to_dst", got.intermediates->seq_to_dst, one_hot), "");
  EXPECT_EQ(difference("tokens", got.intermediates->tokens_to_dst_per_dispatch, tokens), "");
  EXPECT_EQ(difference("num_received_seqs", got.intermediates->num_received_seqs,
                       IndexArray::vector({2, 2, 3})),
            "");
}

// Two copies, a hole before a copy and one rank that gets nothing from the other.
TEST(ComputeMetadata, CopiesReturnToPlanesOfTheHomeRanksRows) {
  const IndexArray len = IndexArray::matrix({{3, 2}, {4, 0}});
  const IndexArray dispatch = IndexArray::cube({{{0, 1}, {1, -1}}, {{-1, 0}, {-1, -1}}});
  Metadata fwd;
  fwd.dst_rank = dispatch;
  fwd.dst_offset = IndexArray::cube({{{0, 0}, {3, 0}}, {{0, 3}, {0, 0}}});
  fwd.seq_len = len;
  fwd.num_recv_tokens = IndexArray::matrix({{3, 4, 7}, {5, 0, 5}});
  fwd.num_seqs = IndexArray::vector({2, 1});
  fwd.world_size = 2;
  fwd.num_total_recv_tokens = {7, 5};
  Metadata rev;
  rev.dst_rank = IndexArray::matrix({{0, 1}, {0, 0}});
  rev.dst_offset = IndexArray::matrix({{0, 4}, {5, 3}});
  rev.seq_len = IndexArray::matrix({{3, 4}, {3, 2}});
  rev.num_recv_tokens = IndexArray::matrix({{3, 5, 8}, {4, 0, 4}});
  rev.num_seqs = IndexArray::vector({2, 2});
  rev.world_size = 2;
  rev.num_total_recv_tokens = {8, 4};
  rev.seq_recv_mask = IndexArray::cube({{{1, 1}, {1, 0}}, {{0, 1}, {0, 0}}}).to(DType::boolean);
  rev.recv_seq_lens = len;
  const DispatchMetadata got = compute_metadata(len, dispatch);
  EXPECT_EQ(difference(got.fwd, fwd), "");
  EXPECT_EQ(difference(got.rev, rev), "");
}

TEST(ComputeMetadata, TwoCopiesMayGoToOneRank) {
  const DispatchMetadata got =
      compute_metadata(IndexArray::matrix({{3}}), IndexArray::cube({{{0, 0}}}));
  EXPECT_EQ(got.fwd.dst_offset, IndexArray::cube({{{0, 3}}}));
  EXPECT_EQ(got.fwd.num_recv_tokens, IndexArray::matrix({{6, 6}}));
  EXPECT_EQ(got.rev.dst_offset, IndexArray::matrix({{0, 3}}));
  EXPECT_EQ(got.rev.num_recv_tokens, IndexArray::matrix({{6, 6}}));
}

TEST(ComputeMetadata, AShardOfLengthZeroKeepsItsEntry) {
  const DispatchMetadata got =
      compute_metadata(IndexArray::matrix({{2, 0, 3}}), IndexArray::matrix({{0, 0, 0}}));
  EXPECT_EQ(got.fwd.dst_offset, IndexArray::matrix({{0, 2, 2}}));
  EXPECT_EQ(got.fwd.num_seqs, IndexArray::vector({2}));
  EXPECT_EQ(got.rev.dst_rank, IndexArray::matrix({{0, 0, 0}}));
  EXPECT_EQ(got.rev.dst_offset, IndexArray::matrix({{0, 2, 2}}));
  EXPECT_EQ(got.rev.seq_len, IndexArray::matrix({{2, 0, 3}}));
  EXPECT_EQ(got.rev.num_seqs, IndexArray::vector({2}));
}

TEST(ComputeMetadata, AllPaddingGivesAnEmptyReverse) {
  const IndexArray len(Shape{2, 3});
  const DispatchMetadata got = compute_metadata(len, IndexArray::full({2, 3, 2}, -1), true);
  EXPECT_EQ(got.fwd.dst_rank, IndexArray::full({2, 3, 2}, -1));
  EXPECT_EQ(got.fwd.dst_offset, IndexArray(Shape{2, 3, 2}));
  EXPECT_EQ(got.rev.dst_rank, IndexArray(Shape{2, 0}));
  EXPECT_EQ(got.rev.dst_offset, IndexArray(Shape{2, 0}));
  EXPECT_EQ(got.rev.seq_len, IndexArray(Shape{2, 0}));
  EXPECT_EQ(got.rev.num_recv_tokens, IndexArray(Shape{2, 3}));
  EXPECT_EQ(got.rev.seq_recv_mask, IndexArray(Shape{2, 3, 2}, DType::boolean));
  EXPECT_EQ(got.intermediates->num_received_seqs, IndexArray(Shape{2}));
}

TEST(ComputeMetadata, NoShardsAtAll) {
  const DispatchMetadata flat =
      compute_metadata(IndexArray(Shape{2, 0}), IndexArray(Shape{2, 0}), true);
  EXPECT_EQ(flat.fwd.dst_rank, IndexArray(Shape{2, 0}));
  EXPECT_EQ(flat.fwd.num_recv_tokens, IndexArray(Shape{2, 3}));
  EXPECT_EQ(flat.fwd.num_seqs, IndexArray(Shape{2}));
  EXPECT_EQ(flat.rev.dst_rank, IndexArray(Shape{2, 0}));
  EXPECT_EQ(flat.intermediates->seq_to_dst, IndexArray(Shape{2, 0, 1, 2}));
  const DispatchMetadata cube =
      compute_metadata(IndexArray(Shape{2, 0}), IndexArray(Shape{2, 0, 4}));
  EXPECT_EQ(cube.fwd.dst_offset, IndexArray(Shape{2, 0, 4}));
  EXPECT_EQ(cube.rev.seq_recv_mask, IndexArray(Shape{2, 0, 4}, DType::boolean));
  EXPECT_EQ(cube.rev.recv_seq_lens, IndexArray(Shape{2, 0}));
}

TEST(ComputeMetadata, AKeptShardIsSteppedOver) {
  const DispatchMetadata got = compute_metadata(
      IndexArray::matrix({{2, 3, 4}}), IndexArray::matrix({{0, -1, 0}}), false, Undispatched::keep);
  EXPECT_EQ(got.fwd.dst_rank, IndexArray::matrix({{0, -1, 0}}));
  EXPECT_EQ(got.fwd.dst_offset, IndexArray::matrix({{0, 0, 2}}));
  EXPECT_EQ(got.fwd.num_recv_tokens, IndexArray::matrix({{6, 6}}));
  EXPECT_EQ(got.fwd.num_seqs, IndexArray::vector({3}));
  EXPECT_EQ(got.rev.dst_offset, IndexArray::matrix({{0, 5}}));
  EXPECT_EQ(got.rev.seq_len, IndexArray::matrix({{2, 4}}));
  EXPECT_EQ(got.rev.num_seqs, IndexArray::vector({2}));
}

}  // namespace
}  // namespace waybill
