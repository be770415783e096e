#include <gtest/gtest.h>

#include "json/support.h"
#include "waybill/json/file.h"
#include "waybill/json/length_distribution_json.h"

namespace waybill::json_tests {
namespace {

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
