#include "waybill/core/error.h"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

namespace waybill {
namespace {

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
