#include "waybill/core/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "waybill/core/error.h"

namespace waybill {
namespace {

// The numbers below come from an implementation of the generator in another language.

TEST(Random, is_the_standards_engine) {
  Random random(5489);
  std::uint64_t last = 0;
  for (int i = 0; i < 10000; ++i) last = random.bits();
  EXPECT_EQ(last, 9981545732273789042U);  // ISO C++, [rand.predef]
}

TEST(Random, first_values_are_the_same_everywhere) {
  Random random(7);
  EXPECT_EQ(random.bits(), 13915952638675311015U);
  EXPECT_EQ(random.bits(), 17511516338625233250U);
  EXPECT_EQ(random.bits(), 2165911192842364878U);
  EXPECT_EQ(Random(0).bits(), 2947667278772165694U);
}

TEST(Random, below_is_the_same_everywhere) {
  Random random(7);
  for (const std::int64_t expected : {7, 9, 1, 8, 1, 0, 8, 9, 2, 7, 7, 5}) {
    EXPECT_EQ(random.below(10), expected);
  }
  Random wide(7);
  constexpr std::int64_t bound = (std::int64_t{1} << 62) + 1;
  EXPECT_EQ(wide.below(bound), 3478988159668827754);
  EXPECT_EQ(wide.below(bound), 4377879084656308313);
  EXPECT_EQ(wide.below(bound), 541477798210591219);
}

TEST(Random, uniforms_are_the_same_everywhere) {
  Random floats(7);
  EXPECT_EQ(floats.uniform_float(), 12656485 * 0x1p-24F);
  EXPECT_EQ(floats.uniform_float(), 15926631 * 0x1p-24F);
  Random doubles(7);
  EXPECT_EQ(doubles.uniform_double(), 6794898749353179 * 0x1p-53);
  EXPECT_EQ(doubles.uniform_double(), 8550545087219352 * 0x1p-53);
}

TEST(Random, permutation_is_the_same_everywhere) {
  EXPECT_EQ(Random(7).permutation(8, 8), (std::vector<std::int32_t>{6, 7, 2, 1, 4, 5, 3, 0}));
  EXPECT_EQ(Random(7).permutation(8, 3), (std::vector<std::int32_t>{6, 7, 2}));
}

TEST(Random, below_stays_below_and_reaches_everything) {
  Random random(1);
  std::array<int, 6> count{};
  for (int i = 0; i < 6000; ++i) ++count.at(static_cast<std::size_t>(random.below(6)));
  for (const int times : count) {
    EXPECT_GT(times, 850);
    EXPECT_LT(times, 1150);
  }
  for (int i = 0; i < 100; ++i) EXPECT_EQ(random.below(1), 0);
  constexpr std::int64_t big = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < 100; ++i) {
    const std::int64_t value = random.below(big);
    EXPECT_TRUE(0 <= value && value < big);
  }
}

TEST(Random, below_refuses_an_empty_range) {
  Random random(1);
  EXPECT_THROW((void)random.below(0), InvalidArgument);
  EXPECT_THROW((void)random.below(-3), InvalidArgument);
}

TEST(Random, uniforms_are_in_the_half_open_interval) {
  Random random(3);
  for (int i = 0; i < 10000; ++i) {
    const float narrow = random.uniform_float();
    const double wide = random.uniform_double();
    ASSERT_TRUE(0.0F <= narrow && narrow < 1.0F);
    ASSERT_TRUE(0.0 <= wide && wide < 1.0);
  }
}

TEST(Random, permutation_holds_each_number_once) {
  std::vector<std::int32_t> order = Random(9).permutation(100, 100);
  std::sort(order.begin(), order.end());
  std::vector<std::int32_t> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
  EXPECT_TRUE(Random(9).permutation(5, 0).empty());
  EXPECT_TRUE(Random(9).permutation(0, 0).empty());
}

TEST(Random, permutation_refuses_more_than_there_are) {
  Random random(1);
  EXPECT_THROW((void)random.permutation(3, 4), InvalidArgument);
  EXPECT_THROW((void)random.permutation(3, -1), InvalidArgument);
  EXPECT_THROW((void)random.permutation(-1, 0), InvalidArgument);
}

}  // namespace
}  // namespace waybill
