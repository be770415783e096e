#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
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

/// Two buckets: three of four documents are short.
LengthDistribution two_sizes() {
  return {.name = "two", .source = "", .buckets = {{0, 64, 750, 40.0}, {1000, 3000, 250, 1400.0}}};
}

TEST(SampleDocuments, FillsTheTokensExactly) {
  for (const std::int64_t tokens : {0, 1, 63, 1000, 123457}) {
    const auto lengths = sample_documents(two_sizes(), tokens, 5);
    EXPECT_EQ(sum(lengths), tokens);
    for (const std::int64_t length : lengths) EXPECT_GE(length, 1);
  }
  EXPECT_TRUE(sample_documents(two_sizes(), 0, 5).empty());
}

TEST(SampleDocuments, TheSeedDecides) {
  EXPECT_EQ(sample_documents(two_sizes(), 100000, 1), sample_documents(two_sizes(), 100000, 1));
  EXPECT_NE(sample_documents(two_sizes(), 100000, 1), sample_documents(two_sizes(), 100000, 2));
}

TEST(SampleDocuments, LengthsStayInTheirBuckets) {
  auto lengths = sample_documents(two_sizes(), 5000000, 9);
  lengths.pop_back();  // cut to fit
  for (const std::int64_t length : lengths) {
    const bool short_one = 1 <= length && length < 64;
    const bool long_one = 1000 <= length && length < 3000;
    EXPECT_TRUE(short_one || long_one) << length;
  }
}

// 5 standard errors: of the share of long documents, and of the mean in each bucket.
TEST(SampleDocuments, SharesAndMeansAreKept) {
  const auto lengths = sample_documents(two_sizes(), 20000000, 4);
  std::vector<std::int64_t> short_ones, long_ones;
  for (const std::int64_t length : lengths)
    (length < 64 ? short_ones : long_ones).push_back(length);
  const auto count = static_cast<double>(lengths.size());
  const double share = static_cast<double>(long_ones.size()) / count;
  EXPECT_NEAR(share, 0.25, 5 * std::sqrt(0.25 * 0.75 / count));
  const auto mean = [](const std::vector<std::int64_t>& values) {
    return static_cast<double>(sum(values)) / static_cast<double>(values.size());
  };
  EXPECT_NEAR(mean(short_ones), 40.0,
              5 * 20 / std::sqrt(static_cast<double>(short_ones.size())) + 0.5);
  EXPECT_NEAR(mean(long_ones), 1400.0,
              5 * 600 / std::sqrt(static_cast<double>(long_ones.size())) + 0.5);
}

TEST(SampleDocuments, WithoutAMeanTheMiddleIsTaken) {
  const LengthDistribution flat{.name = "flat", .source = "", .buckets = {{100, 300, 1, 0}}};
  const auto lengths = sample_documents(flat, 4000000, 8);
  const double mean = static_cast<double>(sum(lengths)) / static_cast<double>(lengths.size());
  EXPECT_NEAR(mean, 200.0, 5 * 58 / std::sqrt(20000.0) + 0.5);
}

TEST(SampleDocuments, MaxLenIsKept) {
  LengthDistribution open{.name = "open", .source = "", .buckets = {{1000, 100000, 1, 0}}};
  open.max_len = 1500;
  const auto lengths = sample_documents(open, 1000000, 8);
  EXPECT_LE(*std::max_element(lengths.begin(), lengths.end()), 1500);
}

TEST(SampleDocuments, BucketsWithoutDocumentsGiveNone) {
  LengthDistribution gap = two_sizes();
  gap.buckets.insert(gap.buckets.begin() + 1, {64, 1000, 0, 100.0});
  gap.buckets.push_back({3000, 4000, 0, 3500.0});
  auto lengths = sample_documents(gap, 1000000, 2);
  lengths.pop_back();
  for (const std::int64_t length : lengths) {
    EXPECT_TRUE(length < 64 || (1000 <= length && length < 3000)) << length;
  }
}

TEST(SampleDocumentsProperty, AnyMeanAndAnyTotal) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const auto lo = dice.in_range<std::int64_t>(0, 50);
    const auto width = dice.in_range<std::int64_t>(1, 50);
    const auto tokens = dice.in_range<std::int64_t>(0, 5000);
    const auto known_mean = dice.in_range<std::int64_t>(lo, lo + width);
    const auto mean = static_cast<double>(dice.one_of<std::int64_t>({0, known_mean}));
    const LengthDistribution one{
        .name = "one", .source = "", .buckets = {{lo, lo + width, 3, mean}}};
    auto lengths = sample_documents(one, tokens, seed);
    EXPECT_EQ(sum(lengths), tokens);
    if (lengths.empty()) return;
    EXPECT_GE(lengths.back(), 1);
    lengths.pop_back();
    for (const std::int64_t length : lengths) {
      EXPECT_GE(length, std::max<std::int64_t>(lo, 1));
      EXPECT_LE(length, std::max<std::int64_t>(lo + width - 1, 1));
    }
  });
}

TEST(LengthDistributionCheck, Errors) {
  const auto fails = [](std::vector<LengthDistribution::Bucket> buckets,
                        std::initializer_list<std::string_view> parts) {
    const LengthDistribution bad{.name = "bad", .source = "", .buckets = std::move(buckets)};
    const auto by_check = rejects([&] { bad.check(); }, parts);
    return by_check ? rejects([&] { (void)sample_documents(bad, 10, 0); }, parts) : by_check;
  };
  EXPECT_TRUE(fails({}, {"bad", "buckets"}));
  EXPECT_TRUE(fails({{5, 5, 1, 0}}, {"bad", "bucket 0", "[5, 5)"}));
  EXPECT_TRUE(fails({{0, 4, 1, 0}, {9, 4, 1, 0}}, {"bad", "bucket 1", "[9, 4)"}));
  EXPECT_TRUE(fails({{-1, 4, 1, 0}}, {"bad", "bucket 0", "-1"}));
  EXPECT_TRUE(fails({{0, 4, -2, 0}}, {"bad", "bucket 0", "docs = -2"}));
  EXPECT_TRUE(fails({{2, 4, 1, 1}}, {"bad", "bucket 0", "mean_len = 1", "2 <= mean_len < 4"}));
  EXPECT_TRUE(fails({{2, 4, 1, 4}}, {"bad", "bucket 0", "mean_len = 4"}));
  EXPECT_TRUE(fails({{0, 4, 0, 0}, {4, 8, 0, 0}}, {"bad", "no documents"}));
  EXPECT_NO_THROW(two_sizes().check());
}

TEST(SampleDocuments, Errors) {
  EXPECT_TRUE(rejects([] { (void)sample_documents(two_sizes(), -1, 0); },
                      {"sample_documents", "num_tokens = -1"}));
}

}  // namespace
}  // namespace waybill
