#include "runtime/capture_log.h"

#include <gtest/gtest.h>

namespace waybill::detail {
namespace {

bool call(CaptureLog& log, std::uint64_t capture) {
  const bool off = log.may_be_off(capture);
  log.count();
  return off;
}

TEST(CaptureLog, without_recordings_nothing_is_off) {
  CaptureLog log;
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(call(log, 0));
}

TEST(CaptureLog, the_first_call_of_each_recording_may_be_off) {
  CaptureLog log;
  EXPECT_TRUE(call(log, 7));
  EXPECT_FALSE(call(log, 7));
  EXPECT_TRUE(call(log, 8));
  EXPECT_FALSE(call(log, 8));
}

TEST(CaptureLog, calls_behind_even_recordings_are_not) {
  CaptureLog log;
  for (const std::uint64_t capture : {3U, 3U, 4U, 4U, 4U, 4U}) (void)call(log, capture);
  EXPECT_FALSE(call(log, 0));
}

TEST(CaptureLog, after_an_odd_one_all_calls_outside_may_be) {
  for (const std::uint64_t odd : {4U, 5U}) {
    CaptureLog log;
    for (const std::uint64_t capture : {3U, 3U, 4U, 4U}) (void)call(log, capture);
    (void)call(log, odd);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(call(log, 0));
    EXPECT_TRUE(call(log, 6));
    EXPECT_FALSE(call(log, 6));
    EXPECT_TRUE(call(log, 0));
  }
}

TEST(CaptureLog, to_ask_is_not_to_call) {
  CaptureLog log;
  (void)log.may_be_off(2);
  (void)log.may_be_off(2);
  (void)log.may_be_off(2);
  EXPECT_FALSE(call(log, 0));
}

}  // namespace
}  // namespace waybill::detail
