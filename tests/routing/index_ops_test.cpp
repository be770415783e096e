#include "waybill/routing/index_ops.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "support/expect_error.h"
#include "support/seeded.h"

namespace waybill {
namespace {

using test::Dice;
using test::for_seeds;
using test::rejects;

constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

IndexArray bools(const IndexArray& array) { return array.to(DType::boolean); }

TEST(ExclusiveCumsum, DocumentedExample) {
  EXPECT_EQ(exclusive_cumsum(IndexArray::vector({0, 1, 2, 3, 4, 5})),
            IndexArray::vector({0, 0, 1, 3, 6, 10}));
}

TEST(ExclusiveCumsum, BothDimsOfAMatrix) {
  const IndexArray matrix = IndexArray::matrix({{1, 2, 3}, {4, 5, -6}});
  EXPECT_EQ(exclusive_cumsum(matrix), IndexArray::matrix({{0, 0, 0}, {1, 2, 3}}));
  EXPECT_EQ(exclusive_cumsum(matrix, 1), IndexArray::matrix({{0, 1, 3}, {0, 4, 9}}));
  EXPECT_EQ(exclusive_cumsum(matrix, -1), exclusive_cumsum(matrix, 1));
  EXPECT_EQ(exclusive_cumsum(matrix, -2), exclusive_cumsum(matrix, 0));
}

TEST(ExclusiveCumsum, MiddleDimOfACube) {
  const IndexArray cube =
      IndexArray::cube({{{1, 10}, {2, 20}, {3, 30}}, {{4, 40}, {5, 50}, {6, 60}}});
  EXPECT_EQ(exclusive_cumsum(cube, 1),
            IndexArray::cube({{{0, 0}, {1, 10}, {3, 30}}, {{0, 0}, {4, 40}, {9, 90}}}));
}

TEST(ExclusiveCumsum, EveryDtypeBecomesInt64) {
  const IndexArray flags = IndexArray::vector({1, 0, 1, 1});
  const IndexArray expected = IndexArray::vector({0, 1, 1, 2});
  for (const DType dtype :
       {DType::boolean, DType::int32, DType::uint32, DType::int64, DType::uint64}) {
    EXPECT_EQ(exclusive_cumsum(flags.to(dtype)), expected) << dtype;
  }
}

TEST(ExclusiveCumsum, EmptyAxisStaysEmpty) {
  EXPECT_EQ(exclusive_cumsum(IndexArray(Shape{0})), IndexArray(Shape{0}));
  EXPECT_EQ(exclusive_cumsum(IndexArray(Shape{3, 0}), 1), IndexArray(Shape{3, 0}));
  EXPECT_EQ(exclusive_cumsum(IndexArray(Shape{3, 0}), 0), IndexArray(Shape{3, 0}));
  EXPECT_EQ(exclusive_cumsum(IndexArray(Shape{0, 2}, DType::boolean), 0), IndexArray(Shape{0, 2}));
}

TEST(ExclusiveCumsum, OverflowOnlyWhereTheSumIsUsed) {
  EXPECT_EQ(exclusive_cumsum(IndexArray::vector({largest, 1})), IndexArray::vector({0, largest}));
  EXPECT_TRUE(rejects(
      [] {
        (void)exclusive_cumsum(IndexArray::vector({largest, 1, 0}));
      },
      {"exclusive_cumsum", "int64"}));
}

TEST(ExclusiveCumsum, RejectsScalarsAndWrongDims) {
  const IndexArray matrix(Shape{2, 3});
  EXPECT_TRUE(rejects([] { (void)exclusive_cumsum(IndexArray(Shape{})); }, {"exclusive_cumsum"}));
  EXPECT_TRUE(rejects([&] { (void)exclusive_cumsum(matrix, 2); }, {"exclusive_cumsum", "2"}));
  EXPECT_TRUE(rejects([&] { (void)exclusive_cumsum(matrix, -3); }, {"exclusive_cumsum", "-3"}));
}

TEST(ExclusiveCumsumProperty, EachElementIsTheSumBeforeIt) {
  for_seeds([](Dice& dice) {
    const auto outer = dice.in_range<std::int64_t>(0, 4);
    const auto length = dice.in_range<std::int64_t>(0, 6);
    const auto inner = dice.in_range<std::int64_t>(0, 4);
    IndexArray array(Shape{outer, length, inner});
    for (std::int64_t& value : array.i64()) value = dice.in_range<std::int64_t>(-1000, 1000);
    const IndexArray sums = exclusive_cumsum(array, 1);
    ASSERT_EQ(sums.shape(), array.shape());
    for (std::int64_t i = 0; i < outer; ++i) {
      for (std::int64_t k = 0; k < inner; ++k) {
        std::int64_t sum = 0;
        for (std::int64_t j = 0; j < length; ++j) {
          EXPECT_EQ(sums.at({i, j, k}), sum);
          sum += array.at({i, j, k});
        }
      }
    }
  });
}

TEST(PrependZero, OneSliceInFront) {
  EXPECT_EQ(prepend_zero(IndexArray::vector({3, 4})), IndexArray::vector({0, 3, 4}));
  const IndexArray matrix = IndexArray::matrix({{1, 2}, {3, 4}});
  EXPECT_EQ(prepend_zero(matrix), IndexArray::matrix({{0, 0}, {1, 2}, {3, 4}}));
  EXPECT_EQ(prepend_zero(matrix, 1), IndexArray::matrix({{0, 1, 2}, {0, 3, 4}}));
  EXPECT_EQ(prepend_zero(matrix, -1), prepend_zero(matrix, 1));
  EXPECT_EQ(prepend_zero(IndexArray::cube({{{1, 2}}, {{3, 4}}}), 1),
            IndexArray::cube({{{0, 0}, {1, 2}}, {{0, 0}, {3, 4}}}));
}

TEST(PrependZero, KeepsTheDtype) {
  const IndexArray flags = IndexArray::vector({1, 0, 1});
  for (const DType dtype :
       {DType::boolean, DType::int32, DType::uint32, DType::int64, DType::uint64}) {
    EXPECT_EQ(prepend_zero(flags.to(dtype)), IndexArray::vector({0, 1, 0, 1}).to(dtype)) << dtype;
  }
}

TEST(PrependZero, EmptyAxisGetsLengthOne) {
  EXPECT_EQ(prepend_zero(IndexArray(Shape{0})), IndexArray::vector({0}));
  EXPECT_EQ(prepend_zero(IndexArray(Shape{2, 0}), 1), IndexArray(Shape{2, 1}));
  EXPECT_EQ(prepend_zero(IndexArray(Shape{2, 0}), 0), IndexArray(Shape{3, 0}));
}

TEST(PrependZero, RejectsScalarsAndWrongDims) {
  EXPECT_TRUE(rejects([] { (void)prepend_zero(IndexArray(Shape{})); }, {"prepend_zero"}));
  EXPECT_TRUE(rejects([] { (void)prepend_zero(IndexArray(Shape{2}), 1); }, {"prepend_zero", "1"}));
  EXPECT_TRUE(
      rejects([] { (void)prepend_zero(IndexArray(Shape{2}), -2); }, {"prepend_zero", "-2"}));
}

TEST(MaskByNeg, DocumentedExample) {
  EXPECT_EQ(mask_by_neg(IndexArray::vector({1, 1, 1}), bools(IndexArray::vector({1, 1, 0}))),
            IndexArray::vector({1, 1, -1}));
}

TEST(MaskByNeg, AnyNonzeroMaskIsTrue) {
  // DistCA computes t * bool(mask) + mask - 1, which is t + 1 for a mask of 2.
  EXPECT_EQ(mask_by_neg(IndexArray::vector({7, 8, 9, 0}), IndexArray::vector({2, 0, -5, 1})),
            IndexArray::vector({7, -1, 9, 0}));
}

TEST(MaskByNeg, EveryDtypeAndShape) {
  const IndexArray flags = IndexArray::matrix({{1, 0}, {0, 1}});
  EXPECT_EQ(mask_by_neg(bools(flags), bools(flags)), IndexArray::matrix({{1, -1}, {-1, 1}}));
  EXPECT_EQ(mask_by_neg(flags.to(DType::uint32), flags.to(DType::int32)),
            IndexArray::matrix({{1, -1}, {-1, 1}}));
  EXPECT_EQ(mask_by_neg(IndexArray(Shape{3, 0}), IndexArray(Shape{3, 0})), IndexArray(Shape{3, 0}));
  EXPECT_EQ(mask_by_neg(IndexArray(Shape{}, {5}), IndexArray(Shape{}, {0})),
            IndexArray(Shape{}, {-1}));
}

TEST(MaskByNeg, RejectsAnotherShape) {
  EXPECT_TRUE(rejects(
      [] {
        (void)mask_by_neg(IndexArray(Shape{2, 3}), IndexArray(Shape{3, 2}));
      },
      {"mask_by_neg", "mask", "[3, 2]", "[2, 3]"}));
  EXPECT_TRUE(rejects(
      [] {
        (void)mask_by_neg(IndexArray(Shape{2}), IndexArray(Shape{1, 2}));
      },
      {"mask_by_neg", "[1, 2]", "[2]"}));
}

TEST(IndexPut, DocumentedExample) {
  const IndexArray array = IndexArray::vector({1, 2, 3, 4});
  EXPECT_EQ(index_put_with_neg_padding_1d(array, IndexArray::vector({10, 11, 12, 13}),
                                          IndexArray::vector({1, 2, 3, -1})),
            IndexArray::vector({1, 10, 11, 12}));
  EXPECT_EQ(array, IndexArray::vector({1, 2, 3, 4}));
}

TEST(IndexPut, OfRepeatedIndicesTheLastWins) {
  EXPECT_EQ(
      index_put_with_neg_padding_1d(IndexArray::vector({0, 0}), IndexArray::vector({5, 6, 7, 8}),
                                    IndexArray::vector({1, 0, 1, -1})),
      IndexArray::vector({6, 7}));
}

TEST(IndexPut, WorksOnFlattenedElements) {
  EXPECT_EQ(index_put_with_neg_padding_1d(IndexArray::matrix({{1, 2}, {3, 4}}),
                                          IndexArray::matrix({{9, 8, 7}}),
                                          IndexArray::vector({3, -1, 1})),
            IndexArray::matrix({{1, 7}, {3, 9}}));
}

TEST(IndexPut, OneSourceValueServesAll) {
  EXPECT_EQ(index_put_with_neg_padding_1d(IndexArray::vector({1, 2, 3}), IndexArray::vector({9}),
                                          IndexArray::vector({2, -1, 0})),
            IndexArray::vector({9, 2, 9}));
}

TEST(IndexPut, OtherDtypesAndEmptyArrays) {
  EXPECT_EQ(index_put_with_neg_padding_1d(bools(IndexArray::vector({1, 0, 0})),
                                          IndexArray::vector({5, 6}).to(DType::uint32),
                                          IndexArray::vector({-1, 2}).to(DType::int32)),
            IndexArray::vector({1, 0, 6}));
  const IndexArray none(Shape{0});
  EXPECT_EQ(index_put_with_neg_padding_1d(none, none, none), none);
  EXPECT_EQ(index_put_with_neg_padding_1d(IndexArray::vector({4}), none, none),
            IndexArray::vector({4}));
  EXPECT_EQ(index_put_with_neg_padding_1d(none, IndexArray::vector({4}), IndexArray::vector({-1})),
            none);
}

TEST(IndexPut, RejectsIndicesThatTheOriginalMisplaces) {
  const IndexArray array = IndexArray::vector({1, 2, 3});
  for (const std::int64_t index : {std::int64_t{3}, std::int64_t{4}, std::int64_t{-2}, -largest}) {
    EXPECT_TRUE(rejects(
        [&] {
          (void)index_put_with_neg_padding_1d(array, IndexArray::vector({8, 9}),
                                              IndexArray(Shape{2}, {0, index}));
        },
        {"index_put_with_neg_padding_1d", "index[1]", std::to_string(index), "-1", "0..2"}));
  }
}

TEST(IndexPut, RejectsAnotherNumberOfValues) {
  EXPECT_TRUE(rejects(
      [] {
        (void)index_put_with_neg_padding_1d(IndexArray(Shape{5}), IndexArray(Shape{2}),
                                            IndexArray(Shape{3}));
      },
      {"index_put_with_neg_padding_1d", "src", "2", "3"}));
  EXPECT_TRUE(rejects(
      [] {
        (void)index_put_with_neg_padding_1d(IndexArray(Shape{5}), IndexArray(Shape{0}),
                                            IndexArray(Shape{3}));
      },
      {"index_put_with_neg_padding_1d", "src", "0", "3"}));
}

}  // namespace
}  // namespace waybill
