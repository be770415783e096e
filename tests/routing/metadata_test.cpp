#include "waybill/routing/metadata.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/difference.h"
#include "support/expect_error.h"
#include "support/random_plan.h"
#include "support/seeded.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"

namespace waybill {
namespace {

using test::Dice;
using test::difference;
using test::for_seeds;
using test::rejects;

DispatchMetadata documented() {
  return compute_metadata(IndexArray::matrix({{10, 5, 0}, {8, 12, 4}, {6, 0, 9}}),
                          IndexArray::matrix({{1, 2, -1}, {2, 0, 1}, {0, -1, 2}}));
}

/// Two copies per shard; shard (0, 1) is padding and (1, 0) has no rows but a destination.
DispatchMetadata with_copies() {
  return compute_metadata(
      IndexArray::matrix({{3, 0, 2}, {0, 0, 4}}),
      IndexArray::cube({{{0, 1}, {-1, -1}, {1, -1}}, {{-1, 0}, {-1, -1}, {0, 1}}}));
}

// DistCA takes the first num_seqs entries, here lengths 6 and 0: the shard of 9 is lost.
TEST(MetadataSlice, InteriorPaddingLosesNoShard) {
  Metadata expected;
  expected.dst_rank = IndexArray::vector({0, 2});
  expected.dst_offset = IndexArray::vector({12, 13});
  expected.seq_len = IndexArray::vector({6, 9});
  expected.num_recv_tokens = IndexArray::vector({5, 8, 9, 22});
  expected.num_total_recv_tokens = {22};
  const Metadata slice = documented().fwd.get_slice(Rank{2});
  EXPECT_EQ(difference(slice, expected), "");
  EXPECT_TRUE(slice.is_slice());
  EXPECT_FALSE(slice.has_copies());
}

TEST(MetadataSlice, TailPaddingIsDropped) {
  const Metadata slice = documented().rev.get_slice(Rank{1});
  EXPECT_EQ(slice.dst_rank, IndexArray::vector({0, 1}));
  EXPECT_EQ(slice.dst_offset, IndexArray::vector({0, 20}));
  EXPECT_EQ(slice.seq_len, IndexArray::vector({10, 4}));
  EXPECT_EQ(slice.num_recv_tokens, IndexArray::vector({12, 4, 8, 24}));
  EXPECT_EQ(slice.num_total_recv_tokens, std::vector<std::int64_t>{24});
  EXPECT_FALSE(slice.num_seqs.has_value());
  EXPECT_FALSE(slice.world_size.has_value());
}

TEST(MetadataSlice, CopiesAndShardsWithoutRows) {
  const DispatchMetadata both = with_copies();
  const Metadata zero = both.fwd.get_slice(Rank{0});
  EXPECT_EQ(zero.dst_rank, IndexArray::matrix({{0, 1}, {1, -1}}));
  EXPECT_EQ(zero.dst_offset, IndexArray::matrix({{0, 0}, {3, 0}}));
  EXPECT_EQ(zero.seq_len, IndexArray::vector({3, 2}));
  EXPECT_TRUE(zero.has_copies());
  // The shard without rows has a destination, so its entry stands, between the right neighbours.
  const Metadata one = both.fwd.get_slice(Rank{1});
  EXPECT_EQ(one.seq_len.to_vector().back(), 4);
  EXPECT_EQ(one.dst_rank.row(one.dst_rank.dim(0) - 1), IndexArray::vector({0, 1}));
  EXPECT_EQ(one.dst_offset.row(one.dst_offset.dim(0) - 1), IndexArray::vector({3, 5}));
}

TEST(MetadataSlice, TheReverseKeepsMaskAndLengthsPadded) {
  const Metadata slice = with_copies().rev.get_slice(Rank{0});
  EXPECT_EQ(slice.seq_recv_mask, IndexArray::matrix({{1, 1}, {0, 0}, {1, 0}}).to(DType::boolean));
  EXPECT_EQ(slice.recv_seq_lens, IndexArray::vector({3, 0, 2}));
}

TEST(MetadataSlice, ARankWithoutEntries) {
  const DispatchMetadata both = compute_metadata(IndexArray::matrix({{0, 0}, {5, 1}}),
                                                 IndexArray::matrix({{-1, -1}, {1, 1}}));
  EXPECT_EQ(both.fwd.get_slice(Rank{0}).seq_len, IndexArray(Shape{0}));
  EXPECT_EQ(both.fwd.get_slice(Rank{0}).num_total_recv_tokens, std::vector<std::int64_t>{0});
  EXPECT_EQ(both.rev.get_slice(Rank{0}).dst_rank, IndexArray(Shape{0}));
}

TEST(MetadataSlice, Errors) {
  const Metadata fwd = documented().fwd;
  EXPECT_TRUE(rejects([&] { (void)fwd.get_slice(Rank{3}); }, {"get_slice", "rank = 3", "0..2"}));
  EXPECT_TRUE(rejects([&] { (void)fwd.get_slice(Rank{-1}); }, {"get_slice", "rank = -1", "0..2"}));
  const Metadata slice = fwd.get_slice(Rank{0});
  EXPECT_TRUE(rejects([&] { (void)slice.get_slice(Rank{0}); }, {"get_slice", "slice"}));
}

/// Entries of a rank that a slice must hold, in order.
TEST(MetadataSliceProperty, HoldsEveryEntryThatMovesRows) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const QkvPlan plan = test::random_plan(seed, {.world_size = dice.in_range(1, 6)});
    const E2eMetadata all = to_dense(compute_qkv_routing(plan));
    for (const Metadata* table : {&all.fwd_q, &all.rev_q, &all.fwd_kv, &all.rev_kv}) {
      for (std::int32_t r = 0; r < plan.world_size; ++r) {
        std::vector<std::int64_t> lens;
        for (const std::int64_t rows : table->seq_len.row(r).to_vector()) {
          if (rows > 0) lens.push_back(rows);
        }
        const Metadata slice = table->get_slice(Rank{r});
        std::vector<std::int64_t> got = slice.seq_len.to_vector();
        std::erase(got, 0);
        EXPECT_EQ(got, lens);
        EXPECT_EQ(slice.num_recv_tokens, table->num_recv_tokens.row(r));
      }
    }
  });
}

TEST(MetadataNormalize, DtypesOfTheDeviceForm) {
  const DispatchMetadata both = with_copies();
  const Metadata fwd = both.fwd.normalize_dtype();
  EXPECT_EQ(fwd.dst_rank, both.fwd.dst_rank.to(DType::int32));
  EXPECT_EQ(fwd.dst_offset, both.fwd.dst_offset.to(DType::uint32));
  EXPECT_EQ(fwd.seq_len, both.fwd.seq_len.to(DType::uint32));
  EXPECT_EQ(fwd.num_recv_tokens, both.fwd.num_recv_tokens.to(DType::uint64));
  EXPECT_EQ(fwd.num_seqs, both.fwd.num_seqs->to(DType::int32));
  EXPECT_FALSE(fwd.seq_recv_mask.has_value());
  EXPECT_TRUE(fwd.normalized);
  EXPECT_FALSE(both.fwd.normalized);
  EXPECT_EQ(fwd.world_size, 2);
  EXPECT_EQ(fwd.num_total_recv_tokens, both.fwd.num_total_recv_tokens);
  const Metadata rev = both.rev.normalize_dtype();
  EXPECT_EQ(rev.seq_recv_mask, both.rev.seq_recv_mask->to(DType::uint32));
  EXPECT_EQ(rev.recv_seq_lens, both.rev.recv_seq_lens->to(DType::uint32));
}

TEST(MetadataNormalize, SlicesBeforeAndAfter) {
  const DispatchMetadata both = with_copies();
  for (const Metadata* table : {&both.fwd, &both.rev}) {
    const Metadata slice = table->get_slice(Rank{1}).normalize_dtype();
    EXPECT_TRUE(slice.normalized);
    EXPECT_EQ(slice.dst_rank.dtype(), DType::int32);
    EXPECT_EQ(slice.num_recv_tokens.dtype(), DType::uint64);
    EXPECT_EQ(difference(table->normalize_dtype().get_slice(Rank{1}), slice), "");
  }
}

TEST(MetadataNormalize, TwiceIsOnce) {
  const Metadata once = with_copies().rev.normalize_dtype();
  EXPECT_EQ(difference(once.normalize_dtype(), once), "");
}

TEST(MetadataNormalize, WhatDoesNotFit) {
  constexpr std::int64_t uint32_end = std::int64_t{1} << 32;
  const auto fails = [](const std::function<void(Metadata&)>& damage,
                        std::initializer_list<std::string_view> parts) {
    Metadata fwd = documented().fwd;
    damage(fwd);
    return rejects([&] { (void)fwd.normalize_dtype(); }, parts);
  };
  EXPECT_TRUE(fails([](Metadata& m) { m.dst_offset.i64()[5] = uint32_end; },
                    {"dst_offset", "4294967296", "uint32"}));
  EXPECT_TRUE(fails([](Metadata& m) { m.dst_offset.i64()[5] = -1; }, {"dst_offset", "-1"}));
  EXPECT_TRUE(
      fails([](Metadata& m) { m.seq_len.i64()[1] = uint32_end + 7; }, {"seq_len", "4294967303"}));
  EXPECT_TRUE(fails([](Metadata& m) { m.dst_rank.i64()[0] = std::int64_t{1} << 31; },
                    {"dst_rank", "2147483648", "int32"}));
  EXPECT_TRUE(fails([](Metadata& m) { m.num_recv_tokens.i64()[3] = -9; },
                    {"num_recv_tokens", "-9", "uint64"}));
  EXPECT_TRUE(fails([](Metadata& m) { m.num_seqs->i64()[2] = std::int64_t{1} << 31; },
                    {"num_seqs", "2147483648"}));
  EXPECT_TRUE(fails(
      [](Metadata& m) {
        m.recv_seq_lens = IndexArray::full({3, 3}, -4);
      },
      {"recv_seq_lens", "-4"}));
  Metadata largest = documented().fwd;
  largest.dst_offset.i64()[5] = uint32_end - 1;
  EXPECT_EQ(largest.normalize_dtype().dst_offset.flat_at(5), uint32_end - 1);
}

TEST(MetadataNormalize, TheErrorNamesThePlace) {
  Metadata fwd = documented().fwd;
  fwd.dst_offset.i64()[5] = -1;  // rank 1, shard 2
  const auto place_as_list = rejects([&] { (void)fwd.normalize_dtype(); }, {"1, 2"});
  const auto place_as_brackets = rejects([&] { (void)fwd.normalize_dtype(); }, {"[1][2]"});
  const auto flat_place = rejects([&] { (void)fwd.normalize_dtype(); }, {"5"});
  EXPECT_TRUE(place_as_list || place_as_brackets || flat_place) << flat_place.message();
}

TEST(MetadataText, NamesEveryShardRankByRank) {
  const Metadata fwd = documented().fwd;
  const std::string text = to_string(fwd);
  std::ostringstream stream;
  stream << fwd;
  EXPECT_EQ(stream.str(), text);
  EXPECT_GE(std::count(text.begin(), text.end(), '\n'), 7) << text;  // 7 shards
  const std::size_t first = text.find("rank 0");
  const std::size_t second = text.find("rank 1", first);
  EXPECT_LT(first, second) << text;
  for (const char* value : {"12", "13", "22"})
    EXPECT_NE(text.find(value), std::string::npos) << text;
  EXPECT_FALSE(to_string(fwd.get_slice(Rank{2})).empty());
  EXPECT_FALSE(to_string(with_copies().rev).empty());
}

std::string printed(const Metadata& metadata) {
  std::ostringstream stream;
  stream << metadata;
  return stream.str();
}

::testing::AssertionResult holds(const std::string& text,
                                 std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << '"' << part << "\" is not in:\n" << text;
    }
  }
  return ::testing::AssertionSuccess();
}

// Who prints wants to see what is odd: an error would hide it.
TEST(MetadataText, WhatIsOddIsShownAndNamed) {
  Metadata rev = with_copies().rev;
  rev.num_recv_tokens = IndexArray::matrix({{7, 8}, {9, 10}});
  EXPECT_TRUE(holds(printed(rev), {"rank 0 at", "receives [7, 8] rows\n",
                                   "odd: num_recv_tokens has shape [2, 2], expected [2, 3]\n"}));
  rev.dst_offset = IndexArray::vector({4, 77});
  rev.world_size = 5;
  EXPECT_TRUE(holds(printed(rev),
                    {"dst_rank: [[", "dst_offset: [4, 77]", "seq_len: [[",
                     "odd: dst_offset has shape [2], expected ",
                     "odd: num_recv_tokens has shape [2, 2]", "odd: world_size = 5, expected 2"}));
  EXPECT_TRUE(holds(printed(Metadata{}), {"Metadata of one rank, 0 entries"}));
  Metadata far = documented().fwd;
  far.dst_rank.i64()[0] = -2;
  far.dst_rank.i64()[1] = 9;
  far.seq_len.i64()[3] = -4;
  EXPECT_TRUE(holds(printed(far), {"rows 0..10 -> rank -2 at 0", "-> rank 9 at", "rows 0..-4"}));
}

TEST(MetadataText, AnyShapeAndDtypeOfAnyFieldPrints) {
  const std::vector<IndexArray> odd = {
      IndexArray(Shape{}),
      IndexArray(Shape{0}),
      IndexArray(Shape{7}),
      IndexArray(Shape{0, 3}),
      IndexArray(Shape{2, 0}),
      IndexArray(Shape{2, 1}),
      IndexArray(Shape{5, 9}),
      IndexArray(Shape{2, 3, 0}),
      IndexArray(Shape{1, 2, 3, 4}),
      IndexArray(Shape{2, 3}, DType::boolean),
      IndexArray::full({2, 3, 2}, std::numeric_limits<std::int64_t>::max()).to(DType::uint64),
      IndexArray::full({2, 3}, std::numeric_limits<std::int64_t>::min())};
  for (const Metadata& table :
       {with_copies().fwd, with_copies().rev, documented().fwd.get_slice(Rank{2}), Metadata{}}) {
    for (const IndexArray& array : odd) {
      for (IndexArray Metadata::*field : {&Metadata::dst_rank, &Metadata::dst_offset,
                                          &Metadata::seq_len, &Metadata::num_recv_tokens}) {
        Metadata changed = table;
        changed.*field = array;
        EXPECT_FALSE(printed(changed).empty());
      }
      for (std::optional<IndexArray> Metadata::*field :
           {&Metadata::seq_recv_mask, &Metadata::recv_seq_lens, &Metadata::num_seqs}) {
        Metadata changed = table;
        changed.*field = array;
        EXPECT_FALSE(printed(changed).empty());
      }
    }
  }
}

TEST(MetadataText, ValuesThatNoInt64HasArePrintedInFull) {
  Metadata fwd = documented().fwd.normalize_dtype();
  const std::vector<std::uint64_t> huge(fwd.num_recv_tokens.to_vector().size(), ~std::uint64_t{0});
  fwd.num_recv_tokens =
      IndexArray::copy_of(huge.data(), fwd.num_recv_tokens.shape(), DType::uint64);
  EXPECT_TRUE(holds(printed(fwd), {"18446744073709551615"}));
  fwd.dst_offset = IndexArray::copy_of(huge.data(), fwd.dst_rank.shape(), DType::uint64);
  fwd.seq_len = fwd.dst_offset;
  EXPECT_TRUE(holds(printed(fwd), {"rank 1 at 18446744073709551615"}));
}

/// The three tables that say where rows go, alone.
Metadata bare(const Metadata& table) {
  Metadata result;
  result.dst_rank = table.dst_rank;
  result.dst_offset = table.dst_offset;
  result.seq_len = table.seq_len;
  return result;
}

TEST(MetadataWithoutCounts, PrintsAndSlicesAndNormalises) {
  const Metadata fwd = bare(with_copies().fwd);
  EXPECT_FALSE(fwd.has_counts());
  EXPECT_NO_THROW(fwd.check_shapes("reader"));
  const std::string text = printed(fwd);
  EXPECT_TRUE(holds(text, {"rows 0..3 -> rank 0 at 0, rank 1 at 0"}));
  EXPECT_EQ(text.find("receives"), std::string::npos) << text;
  EXPECT_EQ(text.find("odd"), std::string::npos) << text;
  const Metadata slice = fwd.get_slice(Rank{0});
  EXPECT_EQ(difference(slice, bare(with_copies().fwd.get_slice(Rank{0}))), "");
  EXPECT_FALSE(slice.has_counts());
  EXPECT_NO_THROW(slice.check_shapes("reader"));
  EXPECT_EQ(printed(slice).find("odd"), std::string::npos);
  EXPECT_FALSE(fwd.normalize_dtype().has_counts());
}

TEST(MetadataWithoutCounts, OneSumPerRankIsEnough) {
  Metadata fwd = documented().fwd;
  fwd.num_recv_tokens = IndexArray::matrix({{18}, {14}, {22}});
  EXPECT_NO_THROW(fwd.check_shapes("reader"));
  EXPECT_TRUE(holds(printed(fwd), {"  receives [18] rows\n"}));
  EXPECT_EQ(fwd.get_slice(Rank{1}).num_recv_tokens, IndexArray::vector({14}));
  EXPECT_TRUE(rejects([&] { fwd.check_counts("reader"); },
                      {"reader: num_recv_tokens has shape [3, 1], expected [3, 4]"}));
}

TEST(MetadataWithoutCounts, WhatNeedsThemNamesThem) {
  const Metadata fwd = bare(documented().fwd);
  EXPECT_TRUE(rejects([&] { fwd.check_counts("reader"); },
                      {"reader: num_recv_tokens is missing, expected counts of shape [3, 4]"}));
  EXPECT_TRUE(rejects([&] { (void)to_sparse(fwd); }, {"num_recv_tokens is missing"}));
  const std::vector<Finding> found = validate(fwd);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].kind, FindingKind::shape);
  EXPECT_EQ(to_string(found[0]),
            "metadata.num_recv_tokens: got none, expected counts of shape [3, 4] (shape)");
}

TEST(MetadataShapes, NumSeqsMayBeAColumn) {
  Metadata fwd = documented().fwd;
  fwd.num_seqs = fwd.num_seqs->reshaped({3, 1});
  EXPECT_NO_THROW(fwd.check_shapes("reader"));
  EXPECT_EQ(printed(fwd), printed(documented().fwd));
  EXPECT_EQ(difference(fwd.get_slice(Rank{2}), documented().fwd.get_slice(Rank{2})), "");
  EXPECT_TRUE(validate(fwd).empty());
  (*fwd.num_seqs).i64()[1] = 7;
  EXPECT_EQ(validate(fwd).size(), 1U);
}

TEST(MetadataShapes, EveryFieldIsNamed) {
  const auto fails = [](const std::function<void(Metadata&)>& damage,
                        std::initializer_list<std::string_view> parts) {
    Metadata rev = with_copies().rev;
    damage(rev);
    const auto named = rejects([&] { rev.check_shapes("reader"); }, {"reader: "});
    return named ? rejects([&] { rev.check_shapes("reader"); }, parts) : named;
  };
  const IndexArray odd(Shape{7, 5});
  EXPECT_NO_THROW(with_copies().rev.check_shapes("reader"));
  EXPECT_NO_THROW(with_copies().fwd.check_shapes("reader"));
  EXPECT_NO_THROW(with_copies().rev.get_slice(Rank{0}).check_shapes("reader"));
  EXPECT_TRUE(fails([&](Metadata& m) { m.dst_rank = odd; }, {"dst_rank", "[7, 5]"}));
  EXPECT_TRUE(fails([&](Metadata& m) { m.dst_offset = odd; }, {"dst_offset", "[7, 5]"}));
  EXPECT_TRUE(fails(
      [&](Metadata& m) {
        m.seq_len = IndexArray(Shape{2, 3, 1});
      },
      {"seq_len", "[2, 3, 1]"}));
  EXPECT_TRUE(fails(
      [&](Metadata& m) {
        m.num_recv_tokens = IndexArray(Shape{2, 2});
      },
      {"num_recv_tokens", "[2, 2]", "[2, 3]"}));
  EXPECT_TRUE(
      fails([&](Metadata& m) { m.num_seqs = IndexArray(Shape{3}); }, {"num_seqs", "[3]", "[2]"}));
  EXPECT_TRUE(fails([](Metadata& m) { m.world_size = 3; }, {"world_size", "3", "2"}));
  EXPECT_TRUE(fails([](Metadata& m) { m.num_total_recv_tokens.push_back(1); },
                    {"num_total_recv_tokens", "3", "2"}));
  EXPECT_TRUE(fails([&](Metadata& m) { m.seq_recv_mask = odd; }, {"seq_recv_mask", "[7, 5]"}));
  EXPECT_TRUE(fails([&](Metadata& m) { m.recv_seq_lens = odd; }, {"recv_seq_lens", "[7, 5]"}));
  EXPECT_TRUE(fails([](Metadata& m) { m.dst_rank = IndexArray(Shape{}); }, {"dst_rank"}));
  Metadata slice = with_copies().rev.get_slice(Rank{0});
  slice.dst_offset = odd;
  EXPECT_TRUE(rejects([&] { slice.check_shapes("reader"); }, {"dst_offset", "[7, 5]"}));
  slice = with_copies().rev.get_slice(Rank{0});
  slice.num_recv_tokens = odd;
  EXPECT_TRUE(rejects([&] { slice.check_shapes("reader"); }, {"num_recv_tokens", "[7, 5]"}));
}

// The mask and the lengths describe one buffer, so they must agree on its shards.
TEST(MetadataShapes, MaskAndLengthsOfTheReceivingBufferAgree) {
  Metadata rev = with_copies().rev;
  rev.recv_seq_lens = IndexArray(Shape{2, 4});
  EXPECT_TRUE(rejects([&] { rev.check_shapes("reader"); }, {"recv_seq_lens", "[2, 4]"}));
}

}  // namespace
}  // namespace waybill
