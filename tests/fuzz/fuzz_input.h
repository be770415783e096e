#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>

namespace waybill::fuzz {

/// Reads decisions from the fuzzer's bytes; zeros when they are used up.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  std::uint8_t byte() {
    if (bytes_.empty()) return 0;
    const std::uint8_t first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
  }

  [[nodiscard]] bool empty() const { return bytes_.empty(); }

  /// One of 0..bound-1; bound 1..256.
  std::int64_t below(std::int64_t bound) { return byte() % bound; }

  /// Mostly one of low..high, at most 200 values; one byte in 24 gives something absurd.
  std::int64_t value(std::int64_t low, std::int64_t high) {
    constexpr std::array<std::int64_t, 10> absurd{
        -1,
        -2,
        std::numeric_limits<std::int64_t>::min(),
        std::numeric_limits<std::int64_t>::max(),
        std::int64_t{1} << 62,
        std::int64_t{1} << 40,
        (std::int64_t{1} << 40) + 1,
        std::int64_t{1} << 32,
        (std::int64_t{1} << 31) - 1,
        -(std::int64_t{1} << 31),
    };
    const std::int64_t drawn = byte();
    if (drawn >= 246) return absurd[static_cast<std::size_t>(drawn - 246)];
    return low + drawn % (high - low + 1);
  }

 private:
  std::span<const std::uint8_t> bytes_;
};

}  // namespace waybill::fuzz
