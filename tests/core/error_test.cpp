#include "waybill/core/error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "waybill/core/dtype.h"
#include "waybill/core/index_array.h"
#include "waybill/core/topology.h"

namespace waybill {
namespace {

/// Whether a part reads as the stream writes it.
template <class Value>
testing::AssertionResult reads_as_streamed(const Value& value) {
  std::ostringstream expected;
  expected << value;
  const std::string got = concat(value);
  if (got == expected.str()) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "got \"" << got << "\", expected \"" << expected.str() << '"';
}

TEST(TextPart, IntegersOfEveryWidth) {
  EXPECT_TRUE(reads_as_streamed(short{-7}));
  EXPECT_TRUE(reads_as_streamed(std::numeric_limits<std::int32_t>::min()));
  EXPECT_TRUE(reads_as_streamed(std::numeric_limits<std::uint32_t>::max()));
  EXPECT_TRUE(reads_as_streamed(std::numeric_limits<std::int64_t>::min()));
  EXPECT_TRUE(reads_as_streamed(std::numeric_limits<std::uint64_t>::max()));
  EXPECT_TRUE(reads_as_streamed(std::numeric_limits<unsigned long long>::max()));
  EXPECT_EQ(concat(true, false), "10");
}

TEST(TextPart, OneByteIsACharacterWhateverItsSign) {
  EXPECT_EQ(concat('a', std::int8_t{'b'}, std::uint8_t{'c'}), "abc");
}

TEST(TextPart, FloatingPointNumbersHaveSixDigits) {
  for (const double value : {0.0, -0.0, 0.1, 1.0 / 3, 2.5e-7, 1e6, 123456789.0, 1e300}) {
    EXPECT_TRUE(reads_as_streamed(value));
    EXPECT_TRUE(reads_as_streamed(static_cast<float>(value)));
  }
  EXPECT_EQ(concat(123456789.0), "1.23457e+08");
  EXPECT_TRUE(reads_as_streamed(std::nan("")));
  EXPECT_TRUE(reads_as_streamed(-std::numeric_limits<double>::infinity()));
  EXPECT_TRUE(reads_as_streamed(1.0L / 3));
}

TEST(TextPart, StringsOfEveryType) {
  char buffer[8] = "buf";
  const char* pointer = buffer;
  EXPECT_EQ(concat("a", buffer, pointer, std::string("s"), std::string_view("v")), "abufbufsv");
  const std::string with_zero("x\0y", 3);
  EXPECT_EQ(concat(with_zero, std::string_view(with_zero)), with_zero + with_zero);
  EXPECT_EQ(concat("x\0y"), "x");
  EXPECT_EQ(concat(""), "");
  EXPECT_EQ(concat(), "");
}

enum Plain { first = 4 };

TEST(TextPart, AnythingElseByItsOwnOperator) {
  EXPECT_EQ(concat(Rank{3}, ' ', DType::bfloat16), "3 bfloat16");
  EXPECT_TRUE(reads_as_streamed(IndexArray::vector({1, 2})));
  EXPECT_EQ(concat(std::filesystem::path("a/b")), "\"a/b\"");
  EXPECT_EQ(concat(first), "4");
  const std::vector<bool> bits{true, false};
  EXPECT_EQ(concat(bits[0], bits[1]), "10");
  const int number = 1;
  EXPECT_TRUE(reads_as_streamed(static_cast<const void*>(&number)));
  EXPECT_TRUE(reads_as_streamed(&number));
}

// One part must not change how the next is written.
TEST(TextPart, PartsFollowEachOther) {
  EXPECT_EQ(concat("n = ", -1, ", x = ", 0.5, ", rank ", Rank{2}, std::string(", end")),
            "n = -1, x = 0.5, rank 2, end");
}

TEST(Error, all_kinds_derive_from_it) {
  EXPECT_TRUE((std::is_base_of_v<std::runtime_error, Error>));
  EXPECT_TRUE((std::is_base_of_v<Error, InvalidArgument>));
  EXPECT_TRUE((std::is_base_of_v<Error, Unsupported>));
  EXPECT_TRUE((std::is_base_of_v<Error, IoError>));
  EXPECT_TRUE((std::is_base_of_v<Error, InternalError>));
  EXPECT_FALSE((std::is_base_of_v<InvalidArgument, IoError>));
}

TEST(concat, joins_without_separators) {
  EXPECT_EQ(concat("f: n = ", 3, ", x = ", 0.5, ' ', std::string("end")), "f: n = 3, x = 0.5 end");
}

TEST(require, passes_when_it_holds) { EXPECT_NO_THROW(require(true, "never seen")); }

TEST(require, throws_the_joined_text) {
  try {
    require(false, "f: n = ", -1, ", expected >= 0");
    FAIL() << "did not throw";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "f: n = -1, expected >= 0");
  }
}

/// Counts how often it is printed.
struct Counting {
  int* printed;
};
std::ostream& operator<<(std::ostream& out, const Counting& part) {
  ++*part.printed;
  return out;
}

TEST(require, builds_the_text_only_on_failure) {
  int printed = 0;
  require(true, Counting{&printed});
  EXPECT_EQ(printed, 0);
  EXPECT_THROW(require(false, Counting{&printed}), InvalidArgument);
  EXPECT_EQ(printed, 1);
}

TEST(throw_invalid, throws) { EXPECT_THROW(throw_invalid("a", 1), InvalidArgument); }

TEST(Timeout, says_who_waited_for_whom_and_what) {
  const Timeout timeout({.operation = "dispatch",
                         .rank = 3,
                         .peer = 5,
                         .wanted = 7,
                         .seen = 6,
                         .seconds = 10,
                         .peer_node = 0,
                         .peer_local = 5});
  EXPECT_STREQ(timeout.what(),
               "dispatch: rank 3 waited 10.0 s for signal >= 7 from rank 5 (node 0, local_rank 5); "
               "last seen 6");
  EXPECT_EQ(timeout.missed().peer, 5);
  TimeoutInfo in_call = timeout.missed();
  in_call.in_call = true;
  EXPECT_EQ(std::string(Timeout(in_call).what()),
            std::string(timeout.what()) +
                "; ranks may be in different calls, or rank 5 caught an error of this one");
}

}  // namespace
}  // namespace waybill
