#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>

#include "transport/transport.h"

/// What every transport in host memory must do. Each runs on all ranks.
namespace waybill::test {

inline void check_puts_and_signals(Transport& transport) {
  const std::int32_t world = transport.topology().world_size;
  const std::int32_t me = to_int(transport.rank());
  SymmetricBuffer buffer = transport.allocate(world * 8, "test");
  SignalPad pad = transport.allocate_signals(world, "test");
  for (std::uint64_t epoch = 1; epoch <= 50; ++epoch) {
    const std::uint64_t value = epoch * 100 + static_cast<std::uint64_t>(me);
    for (std::int32_t r = 0; r < world; ++r) {
      transport.put_signal(
          buffer, {Rank{r}, me * 8, reinterpret_cast<const std::byte*>(&value), sizeof(value)},
          {&pad, me}, epoch);
    }
    transport.quiet();
    for (std::int32_t r = 0; r < world; ++r) {
      ASSERT_EQ(transport.wait({&pad, r}, epoch, Rank{r}, "test"), epoch);
      std::uint64_t got = 0;
      std::memcpy(&got, buffer.local + r * 8, sizeof(got));
      ASSERT_EQ(got, epoch * 100 + static_cast<std::uint64_t>(r));
    }
    transport.barrier("all have read");
  }
  transport.release(buffer);
  transport.release(pad);
  EXPECT_EQ(buffer.local, nullptr);
  EXPECT_EQ(pad.count, 0);
}

/// For 4 ranks, 2 a node.
inline void check_reach(Transport& transport) {
  SymmetricBuffer buffer = transport.allocate(10, "test");
  const std::int32_t me = to_int(transport.rank());
  for (std::int32_t r = 0; r < 4; ++r) {
    const Reach expected = r == me           ? Reach::self
                           : r / 2 == me / 2 ? Reach::load_store
                                             : Reach::network;
    ASSERT_EQ(transport.reach(Rank{r}), expected);
    ASSERT_EQ(buffer.peers[r] == nullptr, expected == Reach::network);
  }
  ASSERT_EQ(buffer.peers[me], buffer.local);
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(buffer.local) % 256, 0U);
  ASSERT_EQ(std::accumulate(buffer.local, buffer.local + 10, 0,
                            [](int sum, std::byte b) { return sum + static_cast<int>(b); }),
            0);
  transport.release(buffer);
}

/// Rank 3 comes to epoch 1 alone, the others wait for 2. For 4 ranks; ends with Timeout on all.
inline void miss_rank_3(Transport& transport) {
  const SignalPad pad = transport.allocate_signals(4, "test");
  const std::int32_t me = to_int(transport.rank());
  for (std::int32_t r = 0; r < 4; ++r) transport.signal(Rank{r}, {&pad, me}, me == 3 ? 1 : 2);
  for (std::int32_t r = 0; r < 4; ++r) (void)transport.wait({&pad, r}, 2, Rank{r}, "unload");
}

/// Success when a text says that `rank` waited in `operation` for `peer`, with what it wanted and
/// saw, and for about so many seconds.
inline testing::AssertionResult names_timeout(const std::string& text, const TimeoutInfo& missed,
                                              double least_s, double most_s) {
  const std::string begin = concat(missed.operation, ": rank ", missed.rank, " waited ");
  const std::string middle = concat(" for signal >= ", missed.wanted, " from rank ", missed.peer);
  const std::string end = concat("; last seen ", missed.seen);
  for (const std::string& part : {begin, middle, end}) {
    if (text.find(part) == std::string::npos) {
      return testing::AssertionFailure() << "no \"" << part << "\" in: " << text;
    }
  }
  const double seconds = std::stod(text.substr(begin.size()));
  if (seconds < least_s || seconds > most_s) {
    return testing::AssertionFailure()
           << "expected " << least_s << " to " << most_s << " seconds: " << text;
  }
  return testing::AssertionSuccess();
}

}  // namespace waybill::test
