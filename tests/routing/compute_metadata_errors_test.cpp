#include <gtest/gtest.h>

#include <cstdint>
#include <string_view>

#include "support/expect_error.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

using test::rejects;

const IndexArray good_len = IndexArray::matrix({{10, 5, 0}, {8, 12, 4}});
const IndexArray good_dispatch = IndexArray::matrix({{1, 0, -1}, {1, 0, 1}});

::testing::AssertionResult fails(const IndexArray& len, const IndexArray& dispatch,
                                 std::initializer_list<std::string_view> parts) {
  const ::testing::AssertionResult named =
      rejects([&] { (void)compute_metadata(len, dispatch); }, {"compute_metadata: "});
  return named ? rejects([&] { (void)compute_metadata(len, dispatch); }, parts) : named;
}

IndexArray with(IndexArray array, std::size_t at, std::int64_t value) {
  array.i64()[at] = value;
  return array;
}

TEST(ComputeMetadataErrors, TheGoodInputIsGood) {
  EXPECT_NO_THROW((void)compute_metadata(good_len, good_dispatch));
}

TEST(ComputeMetadataErrors, Shapes) {
  EXPECT_TRUE(fails(IndexArray(Shape{3}), IndexArray(Shape{3}), {"seq_len", "[3]", "[W, S]"}));
  EXPECT_TRUE(fails(IndexArray(Shape{}), good_dispatch, {"seq_len"}));
  EXPECT_TRUE(fails(good_len, IndexArray(Shape{6}), {"global_dispatch", "[6]"}));
  EXPECT_TRUE(fails(good_len, IndexArray(Shape{2, 3, 1, 1}), {"global_dispatch", "[2, 3, 1, 1]"}));
  EXPECT_TRUE(fails(good_len, IndexArray(Shape{2, 2}), {"global_dispatch", "[2, 2]", "[2, 3"}));
  EXPECT_TRUE(fails(good_len, IndexArray(Shape{3, 3}), {"global_dispatch", "[3, 3]", "[2, 3"}));
  EXPECT_TRUE(
      fails(good_len, IndexArray(Shape{3, 2, 4}), {"global_dispatch", "[3, 2, 4]", "[2, 3"}));
}

TEST(ComputeMetadataErrors, WorldOfZeroRanks) {
  EXPECT_TRUE(fails(IndexArray(Shape{0, 3}), IndexArray(Shape{0, 3}), {"world_size", "0"}));
}

TEST(ComputeMetadataErrors, WorldTooLarge) {
  const Shape shape{std::int64_t{max_world_size} + 1, 0};
  EXPECT_TRUE(fails(IndexArray(shape), IndexArray(shape), {"world_size", "1048577", "1048576"}));
}

TEST(ComputeMetadata, TablesOfAnyIntegerType) {
  const DispatchMetadata expected = compute_metadata(good_len, good_dispatch, true);
  const auto is_expected = [&](const IndexArray& len, const IndexArray& dispatch) {
    const DispatchMetadata got = compute_metadata(len, dispatch, true);
    return got.fwd == expected.fwd && got.rev == expected.rev &&
           got.intermediates == expected.intermediates;
  };
  for (const DType type : {DType::int32, DType::uint32, DType::uint64}) {
    EXPECT_TRUE(is_expected(good_len.to(type), good_dispatch)) << type;
  }
  EXPECT_TRUE(is_expected(good_len, good_dispatch.to(DType::int32)));
  const IndexArray lens = gen_seq_lens(4, 3, 100);
  EXPECT_NO_THROW((void)compute_metadata(lens, IndexArray({4, 3})));
}

TEST(ComputeMetadataErrors, Dtypes) {
  EXPECT_TRUE(fails(IndexArray({2, 3}, DType::boolean), good_dispatch,
                    {"seq_len has dtype bool, expected integers"}));
  EXPECT_TRUE(fails(good_len, IndexArray({2, 3}, DType::boolean),
                    {"global_dispatch has dtype bool, expected integers"}));
  IndexArray huge = good_len.to(DType::uint64);
  static_cast<std::uint64_t*>(huge.data())[4] = ~std::uint64_t{0};
  EXPECT_TRUE(
      fails(huge, good_dispatch, {"seq_len[1, 1] = 18446744073709551615 does not fit int64"}));
}

TEST(ComputeMetadataErrors, RanksOutsideTheWorld) {
  EXPECT_TRUE(
      fails(good_len, with(good_dispatch, 4, 2), {"global_dispatch", "rank 1", " = 2", "-1", "1"}));
  EXPECT_TRUE(fails(good_len, with(good_dispatch, 0, -2), {"global_dispatch", "rank 0", "-2"}));
  EXPECT_TRUE(fails(good_len, with(good_dispatch, 5, std::int64_t{1} << 40),
                    {"global_dispatch", "rank 1", "1099511627776"}));
}

TEST(ComputeMetadataErrors, NegativeLengths) {
  EXPECT_TRUE(fails(with(good_len, 4, -3), good_dispatch, {"seq_len", "rank 1", " = -3"}));
  // Also where nothing is sent.
  EXPECT_TRUE(fails(with(good_len, 2, -1), good_dispatch, {"seq_len", "rank 0", " = -1"}));
}

TEST(ComputeMetadataErrors, RowsWithoutDestination) {
  EXPECT_TRUE(fails(with(good_len, 2, 7), good_dispatch, {"seq_len", "rank 0", "2", " = 7"}));
  const IndexArray cube = IndexArray::full({2, 3, 2}, -1);
  EXPECT_TRUE(fails(good_len, cube, {"seq_len", "rank 0", " = 10"}));
}

TEST(ComputeMetadataErrors, OneCopyIsDestinationEnough) {
  EXPECT_NO_THROW((void)compute_metadata(IndexArray::matrix({{5}}), IndexArray::cube({{{-1, 0}}})));
}

TEST(ComputeMetadataErrors, KeepAllowsOnlyRowsWithoutDestination) {
  const auto keep = [](const IndexArray& len, const IndexArray& dispatch) {
    return compute_metadata(len, dispatch, false, Undispatched::keep);
  };
  EXPECT_NO_THROW((void)keep(with(good_len, 2, 7), good_dispatch));
  EXPECT_TRUE(
      rejects([&] { (void)keep(with(good_len, 2, -7), good_dispatch); }, {"seq_len", "-7"}));
  EXPECT_TRUE(rejects([&] { (void)keep(good_len, with(good_dispatch, 2, 2)); },
                      {"global_dispatch", " = 2"}));
}

TEST(ComputeMetadataErrors, MoreRowsThanAnyBufferHolds) {
  const std::int64_t most = std::int64_t{1} << 40;
  EXPECT_NO_THROW((void)compute_metadata(IndexArray(Shape{1, 1}, {most}), IndexArray(Shape{1, 1})));
  EXPECT_TRUE(
      fails(IndexArray(Shape{1, 1}, {most + 1}), IndexArray(Shape{1, 1}), {"seq_len", "2^40"}));
  EXPECT_TRUE(
      fails(IndexArray(Shape{2, 1}, {most, 1}), IndexArray(Shape{2, 1}), {"seq_len", "2^40"}));
  EXPECT_TRUE(fails(IndexArray::full({1, 4}, std::int64_t{1} << 62), IndexArray(Shape{1, 4}),
                    {"seq_len", "2^40"}));
}

}  // namespace
}  // namespace waybill
