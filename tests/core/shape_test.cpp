#include "waybill/core/shape.h"

#include <gtest/gtest.h>

#include <limits>

#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr std::int64_t big = std::numeric_limits<std::int64_t>::max();

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
