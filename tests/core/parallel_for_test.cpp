#include "core/parallel_for.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "waybill/core/error.h"

namespace waybill {
namespace {

using Chunk = std::pair<std::int64_t, std::int64_t>;

std::vector<Chunk> chunks_of(std::int64_t num_items, std::int64_t grain, int num_threads) {
  std::vector<Chunk> chunks;
  std::mutex mutex;
  parallel_for(num_items, grain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    const std::lock_guard lock(mutex);
    chunks.emplace_back(begin, end);
  });
  std::sort(chunks.begin(), chunks.end());
  return chunks;
}

TEST(parallel_for, chunks_cover_the_range_once_and_none_is_below_the_grain) {
  for (const std::int64_t num_items : {1, 2, 7, 64, 1000, 12345}) {
    for (const std::int64_t grain : {1, 3, 100}) {
      for (const int num_threads : {0, 1, 2, 3, 8}) {
        std::int64_t next = 0;
        for (const auto& [begin, end] : chunks_of(num_items, grain, num_threads)) {
          ASSERT_EQ(begin, next);
          ASSERT_TRUE(end - begin >= grain || end - begin == num_items)
              << begin << ".." << end << " of " << num_items << ", grain " << grain;
          next = end;
        }
        ASSERT_EQ(next, num_items) << "grain " << grain << ", threads " << num_threads;
      }
    }
  }
}

TEST(parallel_for, nothing_to_do_calls_nothing) {
  EXPECT_TRUE(chunks_of(0, 1, 4).empty());
  EXPECT_TRUE(chunks_of(-5, 1, 4).empty());
}

TEST(parallel_for, small_work_stays_on_the_callers_thread) {
  const auto caller = std::this_thread::get_id();
  int calls = 0;
  parallel_for(99, 50, 8, [&](std::int64_t, std::int64_t) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    ++calls;
  });
  EXPECT_EQ(calls, 1);
}

TEST(parallel_for, really_uses_more_than_one_thread) {
  // Each of two chunks waits for the other to have begun: on one thread this would not end.
  std::atomic<int> begun{0};
  parallel_for(2, 1, 2, [&](std::int64_t, std::int64_t) {
    ++begun;
    while (begun < 2) std::this_thread::yield();
  });
  EXPECT_EQ(begun, 2);
}

TEST(parallel_for, ranges_near_the_end_of_int64_do_not_overflow) {
  constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  std::int64_t next = 0;
  for (const auto& [begin, end] : chunks_of(huge, huge / 3, 4)) {
    ASSERT_EQ(begin, next);
    next = end;
  }
  EXPECT_EQ(next, huge);
}

TEST(parallel_for, an_exception_reaches_the_caller) {
  for (const int num_threads : {1, 4}) {
    try {
      parallel_for(1000, 1, num_threads, [](std::int64_t begin, std::int64_t end) {
        if (begin <= 500 && 500 < end) throw std::out_of_range("item 500");
      });
      FAIL() << "did not throw";
    } catch (const std::out_of_range& error) {
      EXPECT_STREQ(error.what(), "item 500");
    }
  }
}

TEST(parallel_for, after_an_exception_no_body_runs_any_more) {
  std::atomic<int> inside{0};
  EXPECT_THROW(parallel_for(10000, 1, 4,
                            [&](std::int64_t, std::int64_t) {
                              ++inside;
                              std::this_thread::yield();
                              --inside;
                              throw std::runtime_error("every chunk fails");
                            }),
               std::runtime_error);
  EXPECT_EQ(inside, 0);
}

TEST(parallel_for, refuses_a_grain_or_a_number_of_threads_that_is_none) {
  const auto nothing = [](std::int64_t, std::int64_t) {};
  EXPECT_THROW(parallel_for(1, 0, 1, nothing), InvalidArgument);
  EXPECT_THROW(parallel_for(1, -1, 1, nothing), InvalidArgument);
  EXPECT_THROW(parallel_for(1, 1, -1, nothing), InvalidArgument);
}

TEST(default_num_threads, is_at_least_one) { EXPECT_GE(default_num_threads(), 1); }

}  // namespace
}  // namespace waybill
