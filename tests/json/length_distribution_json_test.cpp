#include "waybill/json/length_distribution_json.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "json/support.h"
#include "support/test_data.h"
#include "waybill/json/file.h"

namespace waybill::json_tests {
namespace {

constexpr const char* two_buckets = R"({"format": "waybill.length_distributions", "version": 1,
"distributions": {"a": {"source": "s", "n_docs": 7, "max": 90, "histogram": [
{"lo": 0, "hi": 10, "docs": 3, "mean_len": 4.5}, {"lo": 10, "hi": 100, "docs": 4}]}}})";

std::string distribution_error(std::string_view what, std::string_view with) {
  const std::string text = replaced(two_buckets, what, with);
  return error_of([&] { return length_distributions_from_json(text, "d.json"); });
}

bool same(const LengthDistribution& a, const LengthDistribution& b) {
  const auto same_bucket = [](const auto& x, const auto& y) {
    return x.lo == y.lo && x.hi == y.hi && x.docs == y.docs && x.mean_len == y.mean_len;
  };
  return a.name == b.name && a.source == b.source && a.max_len == b.max_len &&
         std::equal(a.buckets.begin(), a.buckets.end(), b.buckets.begin(), b.buckets.end(),
                    same_bucket);
}

TEST(length_distributions, reads_every_field) {
  const auto distributions = length_distributions_from_json(two_buckets);
  ASSERT_EQ(distributions.size(), 1U);
  const LengthDistribution& a = distributions.front();
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.source, "s");
  EXPECT_EQ(a.max_len, 90);
  ASSERT_EQ(a.buckets.size(), 2U);
  EXPECT_EQ(a.buckets[0].hi, 10);
  EXPECT_EQ(a.buckets[0].docs, 3);
  EXPECT_EQ(a.buckets[0].mean_len, 4.5);
  EXPECT_EQ(a.buckets[1].lo, 10);
  EXPECT_EQ(a.buckets[1].mean_len, 0);
}

TEST(length_distributions, read_back_equal) {
  std::vector<LengthDistribution> distributions = builtin_length_distributions();
  distributions.front().buckets.front().mean_len = 1.0 / 3;
  distributions.front().source = "quote \" backslash \\ line\nend \x01";
  for (const JsonStyle style : {JsonStyle::readable, JsonStyle::compact}) {
    const auto again = length_distributions_from_json(to_json(distributions, style));
    EXPECT_TRUE(
        std::equal(again.begin(), again.end(), distributions.begin(), distributions.end(), same));
  }
}

TEST(length_distributions, what_cannot_be_written_is_refused) {
  LengthDistribution one = length_distribution("wlbllm");
  EXPECT_THROW((void)to_json(std::vector{one, one}), InvalidArgument);
  one.buckets.front().mean_len = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW((void)to_json(std::vector{one}), InvalidArgument);
}

TEST(length_distributions, errors_name_the_place) {
  expect_parts(distribution_error("\"docs\": 3", "\"docs\": -1"),
               {"d.json: /distributions/a/histogram/0/docs = -1"});
  expect_parts(distribution_error("\"docs\": 3", "\"docs\": 1e400"), {"d.json: line 3"});
  expect_parts(distribution_error("\"docs\": 3", "\"docs\": \"3\""), {"/histogram/0/docs = \"3\""});
  expect_parts(distribution_error("\"hi\": 10,", "\"hi\": 0,"), {"/histogram/0/hi = 0"});
  expect_parts(distribution_error("\"lo\": 0", "\"lo\": -1"), {"/histogram/0/lo = -1"});
  expect_parts(distribution_error("\"n_docs\": 7", "\"n_docs\": 8"),
               {"/distributions/a/n_docs = 8", "7, the sum of the histogram"});
  expect_parts(distribution_error("\"n_docs\"", "\"docs\""),
               {"/distributions/a: unknown key \"docs\""});
  expect_parts(distribution_error("4.5", "\"4.5\""), {"/histogram/0/mean_len"});
  expect_parts(distribution_error("4.5", "-1e300"),
               {"/distributions/a/histogram/0/mean_len = -1e300"});
  expect_parts(distribution_error("4.5", "10"), {"/mean_len = 10, expected 0 up to below 10"});
  expect_parts(distribution_error("\"version\": 1", "\"version\": 0"), {"/version = 0"});
}

TEST(length_distributions, names_with_slashes_are_escaped_in_paths) {
  expect_parts(distribution_error("\"a\": {\"source\": \"s\"", "\"a/~b\": {\"source\": 1"),
               {"/distributions/a~1~0b/source = 1"});
}

TEST(length_distributions, an_empty_histogram_is_an_error) {
  const std::string text = R"({"format": "waybill.length_distributions", "version": 1,
    "distributions": {"a": {"histogram": []}}})";
  expect_parts(error_of([&] { return length_distributions_from_json(text, "d.json"); }),
               {"d.json: /distributions/a: "});
}

TEST(builtin_length_distributions, are_those_of_the_data_folder) {
  const auto from_file =
      read_length_distributions(test::project_file("data/doclen_distributions.json"));
  const auto& builtin = builtin_length_distributions();
  ASSERT_EQ(builtin.size(), from_file.size());
  for (std::size_t i = 0; i < builtin.size(); ++i) EXPECT_TRUE(same(builtin[i], from_file[i]));
}

TEST(builtin_length_distributions, are_three_in_order) {
  const auto& all = builtin_length_distributions();
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all[0].name, "wlbllm");
  EXPECT_EQ(all[1].name, "prolong");
  EXPECT_EQ(all[2].name, "magi_default");
}

TEST(builtin_length_distributions, buckets_ascend_without_overlap_and_hold_the_mean) {
  for (const LengthDistribution& distribution : builtin_length_distributions()) {
    EXPECT_NO_THROW(distribution.check()) << distribution.name;
    EXPECT_FALSE(distribution.source.empty());
    std::int64_t before = 0;
    for (const auto& bucket : distribution.buckets) {
      EXPECT_LE(before, bucket.lo) << distribution.name;
      before = bucket.hi;
      if (bucket.mean_len == 0) continue;
      EXPECT_TRUE(static_cast<double>(bucket.lo) <= bucket.mean_len &&
                  bucket.mean_len < static_cast<double>(bucket.hi))
          << distribution.name << ", bucket from " << bucket.lo;
    }
  }
}

TEST(builtin_length_distributions, the_histograms_have_the_mean_that_the_file_states) {
  const auto file =
      nlohmann::json::parse(read_file(test::project_file("data/doclen_distributions.json")));
  for (const char* name : {"wlbllm", "prolong"}) {
    double tokens = 0;
    double docs = 0;
    for (const auto& bucket : length_distribution(name).buckets) {
      tokens += bucket.mean_len * static_cast<double>(bucket.docs);
      docs += static_cast<double>(bucket.docs);
    }
    const double mean = file.at("distributions").at(name).at("mean");
    EXPECT_NEAR(tokens / docs, mean, 0.001 * mean) << name;
  }
}

TEST(length_distribution, is_found_with_and_without_prefix) {
  EXPECT_EQ(&length_distribution("dist_wlbllm"), &builtin_length_distributions().front());
  EXPECT_EQ(&length_distribution("wlbllm"), &builtin_length_distributions().front());
  EXPECT_EQ(length_distribution("prolong").name, "prolong");
  EXPECT_EQ(length_distribution("magi_default").name, "magi_default");
}

TEST(length_distribution, an_unknown_name_lists_the_known) {
  for (const char* name : {"", "dist_", "wlb", "DIST_WLBLLM"}) {
    try {
      (void)length_distribution(name);
      FAIL() << name;
    } catch (const InvalidArgument& error) {
      expect_parts(error.what(), {"wlbllm, prolong, magi_default"});
    }
  }
}

using Lengths = std::vector<std::int64_t>;

std::string error_for(std::string_view text) {
  return error_of([&] { return lengths_from_text(text, "lens.txt"); });
}

TEST(lengths, are_separated_by_lines_spaces_and_commas) {
  EXPECT_EQ(lengths_from_text("5"), (Lengths{5}));
  EXPECT_EQ(lengths_from_text("5\n7\n9\n"), (Lengths{5, 7, 9}));
  EXPECT_EQ(lengths_from_text("5 7\t9,11, 13 ,\r\n\n  17  "), (Lengths{5, 7, 9, 11, 13, 17}));
  EXPECT_EQ(lengths_from_text("1099511627776"), (Lengths{std::int64_t{1} << 40}));
}

TEST(lengths, comments_reach_to_the_end_of_the_line) {
  EXPECT_EQ(lengths_from_text("# header 1 2 3\n5 # five\n#\n6#7\n8"), (Lengths{5, 6, 8}));
}

TEST(lengths, may_be_a_json_list) {
  EXPECT_EQ(lengths_from_text("[5, 7,\n 9]"), (Lengths{5, 7, 9}));
  EXPECT_EQ(lengths_from_text(" \n\t[5]\n"), (Lengths{5}));
}

TEST(lengths, a_byte_order_mark_is_skipped) {
  EXPECT_EQ(lengths_from_text("\xEF\xBB\xBF"
                              "5 7"),
            (Lengths{5, 7}));
  EXPECT_EQ(lengths_from_text("\xEF\xBB\xBF[5, 7]"), (Lengths{5, 7}));
}

TEST(lengths, what_is_no_length_is_an_error_with_line_and_text) {
  EXPECT_EQ(error_for("5\n7\n12x\n9"),
            "lens.txt: line 3: \"12x\", expected a document length in tokens, 1..2^40");
  for (const char* word : {"0", "-5", "+5", "1.5", "1e3", "abc", "0x10", "1099511627777",
                           "9223372036854775808", "99999999999999999999999999", ";"}) {
    expect_parts(error_for(concat("5\n", word)), {"lens.txt: line 2: ", word});
  }
}

TEST(lengths, errors_in_a_json_list_name_the_place) {
  expect_parts(error_for("[5, -7]"), {"lens.txt: /1 = -7", "1..2^40"});
  expect_parts(error_for("[5, 0]"), {"lens.txt: /1 = 0"});
  expect_parts(error_for("[5, \"7\"]"), {"lens.txt: /1 = \"7\""});
  expect_parts(error_for("[5, 7.5]"), {"lens.txt: /1 = 7.5"});
  expect_parts(error_for("[5, 1e400]"), {"lens.txt: line 1"});
  expect_parts(error_for("[5, NaN]"), {"lens.txt: line 1"});
  expect_parts(error_for("[5,"), {"lens.txt: line 1"});
  expect_parts(error_for("[5] 7"), {"lens.txt: line 1"});
  expect_parts(error_for("[[5]]"), {"lens.txt: /0"});
}

TEST(lengths, none_at_all_is_an_error) {
  for (const char* text : {"", "\n\n", "# 5\n", "[]", " , "}) {
    expect_parts(error_for(text), {"lens.txt: no lengths"});
  }
}

TEST(lengths, files_are_read_and_named_in_errors) {
  const TemporaryFolder folder;
  write_file(folder / "l.txt", "5 7\n");
  EXPECT_EQ(read_lengths(folder / "l.txt"), (Lengths{5, 7}));
  expect_parts(error_of([&] { return read_lengths(folder / "none"); }),
               {(folder / "none").string()});
}

}  // namespace
}  // namespace waybill::json_tests
