#include "waybill/core/tensor_view.h"

#include <gtest/gtest.h>

#include <limits>

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

}  // namespace
}  // namespace waybill
