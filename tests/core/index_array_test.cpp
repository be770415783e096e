#include "waybill/core/index_array.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "waybill/core/error.h"
#include "waybill/core/table_allocator.h"

namespace waybill::detail {
namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

bool begins_at_multiple_of(const void* memory, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(memory) % bytes == 0;
}

TEST(table_allocator, small_tables_begin_at_cache_lines_and_large_ones_at_huge_pages) {
  const TableVector<std::int32_t> small(3);
  const TableVector<std::int64_t> large(huge_page_bytes / sizeof(std::int64_t));
  EXPECT_TRUE(begins_at_multiple_of(small.data(), 64));
  EXPECT_TRUE(begins_at_multiple_of(large.data(), huge_page_bytes));
}

TEST(table_allocator, tables_start_as_zeros_and_keep_what_is_written) {
  TableVector<std::int64_t> table(huge_page_bytes / 4 + 3);
  EXPECT_EQ(std::accumulate(table.begin(), table.end(), std::int64_t{0}), 0);
  table.back() = 7;
  table.resize(table.size() * 2);
  EXPECT_EQ(std::accumulate(table.begin(), table.end(), std::int64_t{0}), 7);
  EXPECT_EQ(TableVector<std::int64_t>(table), table);
}

TEST(table_allocator, refuses_more_than_any_memory_holds) {
  TableAllocator<std::int64_t> allocator;
  EXPECT_THROW(std::ignore = allocator.allocate(std::numeric_limits<std::size_t>::max() / 4),
               std::bad_alloc);
}

}  // namespace
}  // namespace waybill::detail

namespace waybill {
namespace {

constexpr std::int64_t max_int64 = std::numeric_limits<std::int64_t>::max();

/// The text of the InvalidArgument that `call` throws.
template <class Call>
std::string error_of(Call&& call) {
  try {
    (void)call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  ADD_FAILURE() << "did not throw";
  return "";
}

TEST(IndexArray, starts_empty) {
  const IndexArray array;
  EXPECT_EQ(array.shape(), Shape{0});
  EXPECT_EQ(array.size(), 0);
  EXPECT_EQ(array.dtype(), DType::int64);
}

TEST(IndexArray, of_a_shape_is_zero) {
  for (const DType dtype :
       {DType::boolean, DType::int32, DType::uint32, DType::int64, DType::uint64}) {
    const IndexArray array({2, 3}, dtype);
    EXPECT_EQ(array.dtype(), dtype);
    EXPECT_EQ(array.size(), 6);
    EXPECT_EQ(array.to_vector(), std::vector<std::int64_t>(6, 0));
  }
}

TEST(IndexArray, takes_values_row_by_row) {
  const IndexArray array({2, 3}, std::vector<std::int64_t>{1, 2, 3, 4, 5, 6});
  EXPECT_EQ(array.ndim(), 2);
  EXPECT_EQ(array.dim(0), 2);
  EXPECT_EQ(array.dim(-1), 3);
  EXPECT_EQ(array.at({0, 2}), 3);
  EXPECT_EQ(array.at({1, 0}), 4);
  EXPECT_EQ(array.flat_at(5), 6);
  EXPECT_EQ(array.i64()[4], 5);
}

TEST(IndexArray, of_no_dimensions_is_a_scalar) {
  const IndexArray scalar({}, std::vector<std::int64_t>{42});
  EXPECT_EQ(scalar.size(), 1);
  EXPECT_EQ(scalar.at({}), 42);
  EXPECT_EQ(to_string(scalar), "42");
}

TEST(IndexArray, from_lists) {
  EXPECT_EQ(IndexArray::vector({7, -1}).shape(), (Shape{2}));
  EXPECT_EQ(IndexArray::vector({}).shape(), (Shape{0}));
  const IndexArray matrix = IndexArray::matrix({{1, 2, -1}, {0, 3, 4}});
  EXPECT_EQ(matrix.shape(), (Shape{2, 3}));
  EXPECT_EQ(matrix.at({1, 1}), 3);
  EXPECT_EQ(IndexArray::matrix({{}, {}}).shape(), (Shape{2, 0}));
  const IndexArray cube = IndexArray::cube({{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}, {{9, 0}, {1, 2}}});
  EXPECT_EQ(cube.shape(), (Shape{3, 2, 2}));
  EXPECT_EQ(cube.at({1, 1, 0}), 7);
}

TEST(IndexArray, from_lists_of_different_lengths_is_an_error) {
  EXPECT_THROW((void)IndexArray::matrix({{1, 2}, {3}}), InvalidArgument);
  EXPECT_THROW((void)IndexArray::cube({{{1, 2}}, {{3, 4}, {5, 6}}}), InvalidArgument);
  EXPECT_THROW((void)IndexArray::cube({{{1, 2}, {3}}}), InvalidArgument);
}

TEST(IndexArray, planes_of_different_shapes_are_an_error_when_the_first_is_empty_too) {
  EXPECT_THROW((void)IndexArray::cube({{}, {{1, 2}}}), InvalidArgument);
  EXPECT_THROW((void)IndexArray::cube({{{}}, {{1}}}), InvalidArgument);
}

TEST(IndexArray, full_repeats_a_value) {
  EXPECT_EQ(IndexArray::full({2, 2}, -1), IndexArray::matrix({{-1, -1}, {-1, -1}}));
  EXPECT_EQ(IndexArray::full({0, 5}, 3).size(), 0);
}

TEST(IndexArray, refuses_what_is_no_shape) {
  EXPECT_THROW(IndexArray({2, -1}), InvalidArgument);
  EXPECT_THROW(IndexArray({max_int64, 2}), InvalidArgument);
  EXPECT_THROW(IndexArray({2}, DType::float32), InvalidArgument);
  EXPECT_THROW(IndexArray({2, 2}, std::vector<std::int64_t>{1, 2, 3}), InvalidArgument);
}

TEST(IndexArray, refuses_indices_out_of_bounds) {
  const IndexArray array({2, 3});
  EXPECT_THROW((void)array.at({2, 0}), InvalidArgument);
  EXPECT_THROW((void)array.at({0, 3}), InvalidArgument);
  EXPECT_THROW((void)array.at({0, -1}), InvalidArgument);
  EXPECT_THROW((void)array.at({0}), InvalidArgument);
  EXPECT_THROW((void)array.flat_at(6), InvalidArgument);
  EXPECT_THROW((void)array.flat_at(-1), InvalidArgument);
  EXPECT_THROW((void)array.dim(2), InvalidArgument);
}

TEST(IndexArray, only_int64_has_a_span_of_int64) {
  IndexArray array({2}, DType::int32);
  EXPECT_THROW((void)array.i64(), InvalidArgument);
  EXPECT_THROW((void)std::as_const(array).i64(), InvalidArgument);
}

TEST(IndexArray, converts_every_value_or_none) {
  const IndexArray array = IndexArray::vector({0, 1, 5});
  const IndexArray narrow = array.to(DType::uint32);
  EXPECT_EQ(narrow.dtype(), DType::uint32);
  EXPECT_EQ(narrow.to_vector(), array.to_vector());
  EXPECT_EQ(static_cast<const std::uint32_t*>(narrow.data())[2], 5U);
  EXPECT_EQ(narrow.to(DType::int64), array);
  EXPECT_NE(narrow, array) << "another dtype is another array";
}

TEST(IndexArray, conversion_checks_the_range) {
  const auto last = [](std::int64_t value, DType dtype) {
    return IndexArray::vector({0, value}).to(dtype, "lens");
  };
  constexpr std::int64_t int32_max = std::numeric_limits<std::int32_t>::max();
  constexpr std::int64_t uint32_max = std::numeric_limits<std::uint32_t>::max();
  EXPECT_NO_THROW((void)last(int32_max, DType::int32));
  EXPECT_NO_THROW((void)last(-int32_max - 1, DType::int32));
  EXPECT_NO_THROW((void)last(uint32_max, DType::uint32));
  EXPECT_NO_THROW((void)last(max_int64, DType::uint64));
  EXPECT_NO_THROW((void)last(1, DType::boolean));
  EXPECT_THROW((void)last(int32_max + 1, DType::int32), InvalidArgument);
  EXPECT_THROW((void)last(uint32_max + 1, DType::uint32), InvalidArgument);
  EXPECT_THROW((void)last(-1, DType::uint32), InvalidArgument);
  EXPECT_THROW((void)last(-1, DType::uint64), InvalidArgument);
  EXPECT_THROW((void)last(2, DType::boolean), InvalidArgument);
  const std::string text = error_of([&] { return last(-1, DType::uint32); });
  EXPECT_EQ(text, "lens[1] = -1 does not fit uint32");
  const IndexArray cube({2, 2, 3}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, -10, 11});
  EXPECT_EQ(error_of([&] { return cube.to(DType::uint64, "cube"); }),
            "cube[1, 1, 1] = -10 does not fit uint64");
}

TEST(IndexArray, reading_a_uint64_over_int64_is_an_error) {
  IndexArray array({1}, DType::uint64);
  *static_cast<std::uint64_t*>(array.data()) = std::numeric_limits<std::uint64_t>::max();
  EXPECT_THROW((void)array.flat_at(0), InvalidArgument);
  EXPECT_THROW((void)array.to_vector(), InvalidArgument);
  EXPECT_EQ(error_of([&] { return array.to(DType::int64, "lens"); }),
            "lens[0] = 18446744073709551615 does not fit int64");
  EXPECT_EQ(to_string(array), "[18446744073709551615]");  // printing never throws
}

TEST(IndexArray, reshapes_and_takes_rows) {
  const IndexArray matrix = IndexArray::matrix({{1, 2, 3}, {4, 5, 6}});
  EXPECT_EQ(matrix.reshaped({3, 2}), IndexArray::matrix({{1, 2}, {3, 4}, {5, 6}}));
  EXPECT_THROW((void)matrix.reshaped({4}), InvalidArgument);
  EXPECT_EQ(matrix.row(1), IndexArray::vector({4, 5, 6}));
  EXPECT_EQ(matrix.to(DType::int32).row(0), IndexArray::vector({1, 2, 3}).to(DType::int32));
  EXPECT_THROW((void)matrix.row(2), InvalidArgument);
  EXPECT_THROW((void)matrix.row(-1), InvalidArgument);
  EXPECT_EQ(IndexArray({3, 0}).row(2).shape(), (Shape{0}));
}

TEST(IndexArray, prints_nested_brackets) {
  EXPECT_EQ(to_string(IndexArray::matrix({{1, 2}, {3, -1}})), "[[1, 2], [3, -1]]");
  EXPECT_EQ(to_string(IndexArray({2, 0})), "[[], []]");
  EXPECT_EQ(to_string(IndexArray({0, 4})), "[]");
  EXPECT_EQ(to_string(IndexArray({2}, DType::boolean)), "[0, 0]");
}

TEST(Int64View, borrows_int64_and_converts_the_rest) {
  const IndexArray wide = IndexArray::vector({3, 4});
  EXPECT_EQ(Int64View(wide).span().data(), wide.i64().data());
  const IndexArray narrow = wide.to(DType::int32);
  const Int64View view(narrow);
  EXPECT_EQ(view[1], 4);
  EXPECT_EQ(view.span().size(), 2U);
}

TEST(IndexArray, CopiesElementsOfEveryDtypeFromMemory) {
  const std::int32_t narrow[] = {1, -2, 3, 4, 5, 6};
  const IndexArray array = IndexArray::copy_of(narrow, {2, 3}, DType::int32);
  EXPECT_EQ(array.dtype(), DType::int32);
  EXPECT_EQ(array.to(DType::int64), IndexArray::matrix({{1, -2, 3}, {4, 5, 6}}));
  const bool flags[] = {true, false};
  EXPECT_EQ(IndexArray::copy_of(flags, {2}, DType::boolean).to_vector(),
            (std::vector<std::int64_t>{1, 0}));
  EXPECT_EQ(IndexArray::copy_of(nullptr, {3, 0}, DType::uint64).shape(), (Shape{3, 0}));
  EXPECT_THROW(std::ignore = IndexArray::copy_of(narrow, {-1}, DType::int32), InvalidArgument);
  EXPECT_THROW(std::ignore = IndexArray::copy_of(narrow, {1}, DType::float32), InvalidArgument);
}

}  // namespace
}  // namespace waybill
