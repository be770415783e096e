#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "support/expect_error.h"
#include "support/seeded.h"
#include "support/sum.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

using test::Dice;
using test::for_seeds;
using test::rejects;
using test::sum;

std::vector<std::int64_t> row(const IndexArray& lens, std::int64_t w) {
  return lens.row(w).to_vector();
}

std::int64_t least(const std::vector<std::int64_t>& values) {
  return *std::min_element(values.begin(), values.end());
}

// Equal draws make equal shares, so that the rounding shows: half goes to the even neighbour.
TEST(GenSeqLens, HalvesRoundToEvenAndTheLastTakesTheRest) {
  const std::vector<float> two{0.5F, 0.5F};
  EXPECT_EQ(row(gen_seq_lens(1, 2, 5, two), 0), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(row(gen_seq_lens(1, 2, 7, two), 0), (std::vector<std::int64_t>{4, 3}));
  const std::vector<float> four(4, 0.25F);
  EXPECT_EQ(row(gen_seq_lens(1, 4, 10, four), 0), (std::vector<std::int64_t>{2, 2, 2, 4}));
  EXPECT_EQ(row(gen_seq_lens(1, 4, 6, four), 0), (std::vector<std::int64_t>{2, 2, 2, 0}));
}

TEST(GenSeqLens, SharesFollowTheDraws) {
  // n = 2: shares (0.375 + 0.125) and (0.875 + 0.125) of 1.5: a third and two thirds.
  const std::vector<float> draws{0.375F, 0.875F, 0.875F, 0.375F};
  const IndexArray lens = gen_seq_lens(2, 2, 300, draws);
  EXPECT_EQ(row(lens, 0), (std::vector<std::int64_t>{100, 200}));
  EXPECT_EQ(row(lens, 1), (std::vector<std::int64_t>{200, 100}));
}

TEST(GenSeqLens, DtypeAndShape) {
  const IndexArray lens = gen_seq_lens(3, 5, 1000);
  EXPECT_EQ(lens.dtype(), DType::int32);
  EXPECT_EQ(lens.shape(), (Shape{3, 5}));
}

TEST(GenSeqLens, OneSequenceTakesAllAndNothingStaysNothing) {
  EXPECT_EQ(gen_seq_lens(3, 1, 77).to_vector(), (std::vector<std::int64_t>{77, 77, 77}));
  EXPECT_EQ(gen_seq_lens(2, 3, 0).to_vector(), std::vector<std::int64_t>(6, 0));
  EXPECT_EQ(gen_seq_lens(2, 3, 0, 1, 5).to_vector(), std::vector<std::int64_t>(6, 0));
}

// 8 equal shares of 12 are 1.5 each, rounded to 2: DistCA gives the last -2.
TEST(GenSeqLens, ANegativeRestIsRepaired) {
  const std::vector<float> draws(8, 0.5F);
  const std::vector<std::int64_t> lens = row(gen_seq_lens(1, 8, 12, draws), 0);
  EXPECT_EQ(sum(lens), 12);
  EXPECT_GE(least(lens), 0);
  const std::vector<std::int64_t> filled = row(gen_seq_lens(1, 8, 12, draws, 1), 0);
  EXPECT_EQ(sum(filled), 12);
  EXPECT_GE(least(filled), 1);
}

// Half of the rows or more move to the short sequences; one at a time would take minutes.
TEST(GenSeqLens, AHighMinimumOfAHugeTotal) {
  constexpr std::int64_t total = std::numeric_limits<std::int32_t>::max();
  const std::vector<std::int64_t> lens = row(gen_seq_lens(1, 32, total, 3, total), 0);
  EXPECT_EQ(sum(lens), total);
  EXPECT_GE(least(lens), total / 32);
}

/// Lengths that are too short take rows of the longest, of several from the first.
TEST(GenSeqLensProperty, RowsComeFromTheLongestOneAtATime) {
  for_seeds([](Dice& dice) {
    const auto num_seqs = dice.in_range<std::size_t>(1, 9);
    const auto total = dice.in_range<std::int64_t>(0, 60);
    const auto min_len = dice.in_range<std::int64_t>(0, 12);
    std::vector<float> draws(num_seqs);
    for (float& value : draws) value = dice.uniform_float();
    const auto count = static_cast<std::int64_t>(num_seqs);
    std::vector<std::int64_t> lens = row(gen_seq_lens(1, count, total, draws, 0), 0);
    const std::int64_t minimum = std::min(min_len, total / count);
    while (least(lens) < minimum) {
      ++*std::find_if(lens.begin(), lens.end(), [&](std::int64_t len) { return len < minimum; });
      --*std::max_element(lens.begin(), lens.end());
    }
    EXPECT_EQ(row(gen_seq_lens(1, count, total, draws, min_len), 0), lens);
  });
}

TEST(GenSeqLens, ManySmallTotalsAreNeverNegative) {
  for (const std::int64_t num_seqs : {2, 3, 4, 8, 32}) {
    for (std::int64_t total = 0; total <= 70; ++total) {
      const IndexArray lens =
          gen_seq_lens(20, num_seqs, total, static_cast<std::uint64_t>(total), 1);
      const IndexArray bare =
          gen_seq_lens(20, num_seqs, total, static_cast<std::uint64_t>(total), 0);
      for (std::int64_t w = 0; w < 20; ++w) {
        ASSERT_EQ(sum(row(lens, w)), total);
        ASSERT_GE(least(row(lens, w)), total >= num_seqs ? 1 : 0) << num_seqs << ", " << total;
        ASSERT_EQ(sum(row(bare, w)), total);
        ASSERT_GE(least(row(bare, w)), 0) << num_seqs << ", " << total;
      }
    }
  }
}

TEST(GenSeqLensProperty, RowsSumExactlyAndKeepTheMinimum) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const auto num_seqs = dice.in_range<std::int64_t>(1, 40);
    const auto min_len = dice.in_range<std::int64_t>(0, 50);
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    const auto total = dice.one_of(
        {dice.in_range<std::int64_t>(0, 3000), dice.in_range<std::int64_t>(0, most), most});
    const IndexArray lens = gen_seq_lens(3, num_seqs, total, seed, min_len);
    for (std::int64_t w = 0; w < 3; ++w) {
      EXPECT_EQ(sum(row(lens, w)), total);
      EXPECT_GE(least(row(lens, w)), std::min(min_len, total / num_seqs));
    }
  });
}

// Far from small totals nothing is repaired, so the formula can be followed in double precision.
TEST(GenSeqLensProperty, LengthsFollowTheShares) {
  for_seeds([](Dice& dice) {
    const auto num_seqs = dice.in_range<std::size_t>(2, 12);
    std::vector<float> draws(num_seqs);
    for (float& value : draws) value = dice.uniform_float();
    const std::int64_t total = 100000;
    const std::vector<std::int64_t> lens =
        row(gen_seq_lens(1, static_cast<std::int64_t>(num_seqs), total, draws), 0);
    const double floor_share = 0.25 / static_cast<double>(num_seqs);
    double all = 0;
    for (const float value : draws) all += static_cast<double>(value) + floor_share;
    for (std::size_t i = 0; i + 1 < num_seqs; ++i) {
      const double expected =
          (static_cast<double>(draws[i]) + floor_share) / all * static_cast<double>(total);
      EXPECT_LT(std::abs(static_cast<double>(lens[i]) - expected), 0.6);
    }
  });
}

TEST(GenSeqLens, TheSeedDecides) {
  EXPECT_EQ(gen_seq_lens(4, 6, 5000, 9), gen_seq_lens(4, 6, 5000, 9));
  EXPECT_NE(gen_seq_lens(4, 6, 5000, 9), gen_seq_lens(4, 6, 5000, 10));
  const IndexArray lens = gen_seq_lens(2, 6, 5000, 9);
  EXPECT_NE(row(lens, 0), row(lens, 1));
}

// Pinned: plans of a seed must not change between releases or platforms.
TEST(GenSeqLens, ValuesOfASeedStay) {
  EXPECT_EQ(to_string(gen_seq_lens(2, 4, 1000, 42)), "[[323, 277, 322, 78], [440, 71, 290, 199]]");
}

TEST(GenSeqLens, Errors) {
  EXPECT_TRUE(rejects([] { (void)gen_seq_lens(0, 4, 10); }, {"gen_seq_lens", "world_size = 0"}));
  EXPECT_TRUE(rejects([] { (void)gen_seq_lens(-1, 4, 10); }, {"gen_seq_lens", "world_size = -1"}));
  EXPECT_TRUE(rejects([] { (void)gen_seq_lens(2, 0, 10); }, {"gen_seq_lens", "num_seqs = 0"}));
  EXPECT_TRUE(rejects([] { (void)gen_seq_lens(2, 4, -1); }, {"gen_seq_lens", "total_len = -1"}));
  EXPECT_TRUE(rejects([] { (void)gen_seq_lens(2, 4, std::int64_t{1} << 31); },
                      {"gen_seq_lens", "total_len = 2147483648"}));
  EXPECT_TRUE(
      rejects([] { (void)gen_seq_lens(2, 4, 10, 0, -1); }, {"gen_seq_lens", "min_len = -1"}));
  EXPECT_TRUE(rejects([] { (void)gen_seq_lens(std::int64_t{1} << 20, std::int64_t{1} << 40, 10); },
                      {"gen_seq_lens", "num_seqs"}));
}

TEST(GenSeqLens, ErrorsOfGivenDraws) {
  const auto fails = [](const std::vector<float>& draws,
                        std::initializer_list<std::string_view> parts) {
    return rejects([&] { (void)gen_seq_lens(1, 2, 10, draws); }, parts);
  };
  EXPECT_TRUE(fails({0.5F}, {"gen_seq_lens", "uniforms", "1", "2"}));
  EXPECT_TRUE(fails({0.5F, 0.5F, 0.5F}, {"gen_seq_lens", "uniforms", "3", "2"}));
  EXPECT_TRUE(fails({0.5F, 1.0F}, {"gen_seq_lens", "uniforms[1]", "1"}));
  EXPECT_TRUE(fails({-0.5F, 0.5F}, {"gen_seq_lens", "uniforms[0]", "-0.5"}));
  EXPECT_TRUE(fails({0.5F, std::numeric_limits<float>::quiet_NaN()}, {"uniforms[1]", "nan"}));
  EXPECT_TRUE(rejects([] { (void)gen_seq_lens(1, 2, 10, std::vector<float>(2), -3); },
                      {"gen_seq_lens", "min_len = -3"}));
}

}  // namespace
}  // namespace waybill
