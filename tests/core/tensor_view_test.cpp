#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "support/expect_error.h"
#include "waybill/core/host_tensor.h"

namespace waybill {
namespace {

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

}  // namespace
}  // namespace waybill
