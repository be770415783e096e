#include "waybill/core/host_tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr std::int64_t big = std::numeric_limits<std::int64_t>::max();

static_assert(std::is_trivially_copyable_v<Shape> && std::is_trivially_copyable_v<TensorView> &&
              std::is_trivially_copyable_v<ConstTensorView>);  // no memory of their own

TEST(shape, holds_up_to_eight_extents) {
  Shape shape{4, 7};
  shape.push_back(2);
  EXPECT_EQ(shape, (Shape{4, 7, 2}));
  EXPECT_NE(shape, (Shape{4, 7}));
  shape.pop_back();
  EXPECT_EQ(shape, (Shape{4, 7}));
  EXPECT_EQ(Shape(std::size_t{3}), (Shape{0, 0, 0}));
  EXPECT_EQ(Shape(shape.begin() + 1, shape.end()), (Shape{7}));
  Shape full(Shape::max_axes);
  EXPECT_THROW(full.push_back(1), InvalidArgument);
  EXPECT_EQ(full.size(), Shape::max_axes);
  EXPECT_THROW(Shape(std::size_t{9}), InvalidArgument);
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}), InvalidArgument);
  const std::vector<std::int64_t> nine(9, 1);
  EXPECT_THROW(Shape{std::span(nine)}, InvalidArgument);
}

TEST(num_elements, multiplies_the_extents) {
  EXPECT_EQ(num_elements(Shape{}, "f"), 1);
  EXPECT_EQ(num_elements(Shape{4, 7, 2}, "f"), 56);
  EXPECT_EQ(num_elements(Shape{std::int64_t{1} << 31, std::int64_t{1} << 31}, "f"),
            std::int64_t{1} << 62);
}

TEST(num_elements, an_extent_of_0_makes_it_empty_whatever_the_others_are) {
  EXPECT_EQ(num_elements(Shape{0}, "f"), 0);
  EXPECT_EQ(num_elements(Shape{big, big, 0}, "f"), 0);
}

TEST(num_elements, refuses_negative_extents_and_overflow) {
  EXPECT_THROW((void)num_elements(Shape{3, -1}, "f"), InvalidArgument);
  EXPECT_THROW((void)num_elements(Shape{0, -1}, "f"), InvalidArgument);
  EXPECT_THROW((void)num_elements(Shape{big}, "f"), InvalidArgument);
  EXPECT_THROW((void)num_elements(Shape{std::int64_t{1} << 32, std::int64_t{1} << 32}, "f"),
               InvalidArgument);
  try {
    (void)num_elements(Shape{2, -3}, "who");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "who: shape = [2, -3], expected no negative extent");
  }
}

TEST(shape_to_string, is_a_list) {
  EXPECT_EQ(to_string(Shape{}), "[]");
  EXPECT_EQ(to_string(Shape{4, 7, 2}), "[4, 7, 2]");
}

TEST(normalize_dim, counts_negative_ones_from_the_end) {
  EXPECT_EQ(normalize_dim(0, 3, "f"), 0);
  EXPECT_EQ(normalize_dim(2, 3, "f"), 2);
  EXPECT_EQ(normalize_dim(-1, 3, "f"), 2);
  EXPECT_EQ(normalize_dim(-3, 3, "f"), 0);
}

TEST(normalize_dim, refuses_what_is_no_axis) {
  EXPECT_THROW((void)normalize_dim(3, 3, "f"), InvalidArgument);
  EXPECT_THROW((void)normalize_dim(-4, 3, "f"), InvalidArgument);
  EXPECT_THROW((void)normalize_dim(0, 0, "f"), InvalidArgument);
}

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

TEST(TensorView, contiguous_strides_count_elements) {
  EXPECT_EQ(ConstTensorView::contiguous_strides({4, 7, 2}), (Shape{14, 2, 1}));
  EXPECT_EQ(ConstTensorView::contiguous_strides({}), Shape{});
  EXPECT_EQ(ConstTensorView::contiguous_strides({3, 0, 5}), (Shape{0, 5, 1}));
}

/// Shapes are looked at after the view is made: making it must not overflow.
TEST(TensorView, extents_of_any_size_make_a_view) {
  EXPECT_EQ(ConstTensorView(nullptr, DType::uint8, {most}).strides, Shape{1});
  EXPECT_EQ(ConstTensorView(nullptr, DType::uint8, {most, 2}).strides, (Shape{2, 1}));
  EXPECT_EQ(ConstTensorView(nullptr, DType::uint8, {2, most, 2}).strides, (Shape{most, 2, 1}));
  EXPECT_EQ(ConstTensorView(nullptr, DType::uint8, {1, most, most}).strides,
            (Shape{most, most, 1}));
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(TensorView(nullptr, DType::uint8, {1, least, 2}).strides.back(), 1);
  EXPECT_EQ(TensorView(nullptr, DType::uint8, {1, least, -1}).strides.back(), 1);
}

TEST(TensorView, reads_its_elements) {
  std::vector<float> values{1, 2, 3, 4, 5, 6};
  const TensorView view(values.data(), DType::float32, {3, 2});
  view.as<float>()[5] = 7;
  EXPECT_EQ(values[5], 7);
  const ConstTensorView fixed = view;
  static_assert(std::is_same_v<decltype(fixed.as<float>()), std::span<const float>>);
  EXPECT_TRUE(std::ranges::equal(fixed.as<float>(), values));
  EXPECT_EQ(fixed.as<std::int32_t>().size(), 6U);  // of the same size
  EXPECT_TRUE(TensorView(nullptr, DType::float32, {4, 0}).as<float>().empty());
  TensorView row(values.data(), DType::float32, {1, 2});
  row.strides = {100, 1};  // of one row, it says nothing
  EXPECT_EQ(row.as<float>().size(), 2U);
}

TEST(TensorView, reads_nothing_else) {
  std::vector<float> values(6);
  TensorView view(values.data(), DType::float32, {3, 2});
  EXPECT_TRUE(test::rejects([&] { (void)view.as<double>(); }, {"elements of 8 bytes", "float32"}));
  view.shape = {2, 2};
  view.strides = {3, 1};
  EXPECT_TRUE(test::rejects([&] { (void)view.as<float>(); }, {"strides [3, 1]", "contiguous"}));
  view.strides = {1};
  EXPECT_TRUE(test::rejects([&] { (void)view.as<float>(); }, {"1 strides", "expected 2"}));
}

TEST(host_tensor, starts_as_aligned_zeros) {
  for (const std::int64_t size : {1, 63, 64, 65, 1'000'003}) {
    const HostTensor tensor(DType::uint8, {size});
    EXPECT_EQ(tensor.size_bytes(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.bytes().data()) % 64, 0U);
    EXPECT_TRUE(std::ranges::all_of(tensor.bytes(), [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(host_tensor, is_contiguous_row_major) {
  HostTensor tensor(DType::int32, {2, 3});
  EXPECT_EQ(tensor.size_bytes(), 24);
  const TensorView view = tensor.view();
  EXPECT_EQ(view.shape, (Shape{2, 3}));
  EXPECT_EQ(view.strides, (Shape{3, 1}));
  EXPECT_EQ(view.dtype, DType::int32);
  tensor.as<std::int32_t>()[4] = 7;
  const HostTensor& read_only = tensor;
  EXPECT_EQ(read_only.as<std::int32_t>()[4], 7);
  EXPECT_EQ(read_only.view().data, view.data);
}

TEST(host_tensor, copies_are_deep_and_moves_keep_the_memory) {
  HostTensor first(DType::float32, {4});
  first.as<float>()[2] = 1.5F;
  HostTensor copy = first;
  copy.as<float>()[2] = 2.5F;
  EXPECT_EQ(first.as<float>()[2], 1.5F);
  const void* memory = first.bytes().data();
  const HostTensor moved = std::move(first);
  EXPECT_EQ(moved.bytes().data(), memory);
  EXPECT_EQ(moved.as<float>()[2], 1.5F);
  copy = moved;
  EXPECT_EQ(copy.as<float>()[2], 1.5F);
  EXPECT_NE(copy.bytes().data(), memory);
}

TEST(host_tensor, may_be_empty) {
  const HostTensor none;
  EXPECT_EQ(none.shape(), (Shape{0}));
  EXPECT_TRUE(none.bytes().empty());
  const HostTensor empty(DType::float64, {3, 0, 5});
  const HostTensor copy = empty;
  EXPECT_EQ(copy.size_bytes(), 0);
  EXPECT_TRUE(copy.as<double>().empty());
}

TEST(host_tensor, refuses_what_cannot_be) {
  EXPECT_TRUE(test::rejects([] { HostTensor(DType::uint8, {2, -1}); }, {"[2, -1]"}));
  EXPECT_TRUE(test::rejects([] { HostTensor(DType::int64, {std::int64_t{1} << 61}); }, {"2^62"}));
  HostTensor tensor(DType::float32, {2});
  EXPECT_TRUE(test::rejects([&] { (void)tensor.as<double>(); }, {"8", "expected 4", "float32"}));
}

}  // namespace
}  // namespace waybill
