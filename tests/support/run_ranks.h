#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "waybill/transport/bootstrap.h"

namespace waybill::test {

/// What a rank's body threw; empty text: nothing.
struct RankResult {
  std::exception_ptr error;
  std::string text;
};

/// Runs body(rank) on one thread a rank and waits for all.
inline std::vector<RankResult> run_ranks(std::int32_t world_size,
                                         const std::function<void(std::int32_t)>& body) {
  std::vector<RankResult> results(static_cast<std::size_t>(world_size));
  std::vector<std::jthread> threads;
  for (std::int32_t r = 0; r < world_size; ++r) {
    threads.emplace_back([&, r] {
      RankResult& result = results[static_cast<std::size_t>(r)];
      try {
        body(r);
      } catch (const std::exception& error) {
        result.error = std::current_exception();
        result.text = error.what();
      }
    });
  }
  threads.clear();
  return results;
}

/// The same with a thread bootstrap for each rank.
inline std::vector<RankResult> run_with_bootstrap(
    std::int32_t world_size, double timeout_s,
    const std::function<void(std::shared_ptr<Bootstrap>)>& body) {
  auto bootstraps = make_thread_bootstraps(world_size, timeout_s);
  return run_ranks(world_size, [&](std::int32_t r) {
    body(std::shared_ptr<Bootstrap>(std::move(bootstraps[static_cast<std::size_t>(r)])));
  });
}

inline void expect_no_errors(const std::vector<RankResult>& results) {
  for (std::size_t r = 0; r < results.size(); ++r) {
    EXPECT_EQ(results[r].text, "") << "rank " << r;
  }
}

/// What a rank's Timeout says; fails the test when it is none.
inline TimeoutInfo timeout_of(const RankResult& result) {
  try {
    if (result.error) std::rethrow_exception(result.error);
    ADD_FAILURE() << "expected Timeout, but nothing was thrown";
  } catch (const Timeout& timeout) {
    return timeout.missed();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected Timeout, got: " << error.what();
  }
  return {};
}

}  // namespace waybill::test
