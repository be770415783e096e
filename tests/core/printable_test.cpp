#include "core/printable.h"

#include <gtest/gtest.h>

#include "waybill/core/error.h"

namespace waybill {
namespace {

TEST(Printable, text_stays_as_it_is) {
  EXPECT_EQ(printable(""), "");
  EXPECT_EQ(printable("plan.json: a \"name\", C:\\x1b"), "plan.json: a \"name\", C:\\x1b");
  EXPECT_EQ(printable("Größe 大小 \U0001F600 \u00A0"), "Größe 大小 \U0001F600 \u00A0");
  EXPECT_EQ(printable("one\n\ttwo"), "one\n\ttwo");
}

TEST(Printable, control_characters_are_written_out) {
  EXPECT_EQ(printable("\x1b]0;title\x07"), "\\x1b]0;title\\x07");
  EXPECT_EQ(printable("a\rb\bc\x7f"), "a\\x0db\\x08c\\x7f");
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(printable("\xC2\x9B"
                      "31m"),
            "\\u009b31m");  // C1 in UTF-8: CSI
  EXPECT_EQ(printable("\xC2\x80\xC2\x9F\xC2\xA1"), "\\u0080\\u009f\u00A1");
  EXPECT_EQ(printable("\u202Egpj.exe\u2069\u200F\u061C\u2028"),
            "\\u202egpj.exe\\u2069\\u200f\\u061c\\u2028");
}

TEST(Printable, what_is_no_utf8_is_written_out) {
  EXPECT_EQ(printable("\x9B"
                      "31m"),
            "\\x9b31m");  // C1 as it stands in Latin-1
  EXPECT_EQ(printable("\xFF\xC3"), "\\xff\\xc3");
  EXPECT_EQ(printable("\xC0\x9B"), "\\xc0\\x9b");           // overlong
  EXPECT_EQ(printable("\xE0\x82\x9B"), "\\xe0\\x82\\x9b");  // overlong
  EXPECT_EQ(printable("\xED\xA0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xF4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(printable("\xE2\x80"), "\\xe2\\x80");  // cut off
}

TEST(Printable, a_line_has_no_end) {
  EXPECT_EQ(printable_line("a\nerror: b\tc"), "a\\x0aerror: b\\x09c");
}

/// Whatever an error quotes, of whatever kind it is.
TEST(Printable, errors_are) {
  const std::string evil = "\x1b[2J\xC2\x9B\n";
  EXPECT_STREQ(InvalidArgument(evil).what(), "\\x1b[2J\\u009b\n");
  EXPECT_STREQ(IoError(evil).what(), "\\x1b[2J\\u009b\\x0a");  // names a file: one line
  EXPECT_STREQ(Timeout(TimeoutInfo{.operation = "\x1b"}).what(),
               "\\x1b: rank 0 waited 0.000 s for signal >= 0 from rank 0; last seen 0");
  try {
    throw_invalid("f: name = \"", evil, "\", expected another");
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()).find('\x1b'), std::string::npos);
  }
}

}  // namespace
}  // namespace waybill
