#include <gtest/gtest.h>

#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"

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

}  // namespace
}  // namespace waybill
