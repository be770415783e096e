#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace waybill {

/// A hash of what is added, one after another; the same on every machine. FNV-1a over words of 64
/// bits, each mixed as in splitmix64.
class Hash {
 public:
  Hash& add(std::uint64_t value) {
    std::uint64_t x = value + 0x9E37'79B9'7F4A'7C15;
    x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9;
    x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EB;
    x ^= x >> 31;
    value_ = (std::rotl(value_, 5) ^ x) * 0x0000'0100'0000'01B3;
    return *this;
  }
  Hash& add(std::int64_t value) { return add(static_cast<std::uint64_t>(value)); }
  Hash& add(std::int32_t value) { return add(static_cast<std::int64_t>(value)); }
  Hash& add(bool value) { return add(std::uint64_t{value ? 1U : 0U}); }
  Hash& add(double value) { return add(std::bit_cast<std::uint64_t>(value)); }
  Hash& add(std::span<const std::int64_t> values) { return add_all(values); }
  Hash& add(std::span<const std::int32_t> values) { return add_all(values); }
  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  template <class Value>
  Hash& add_all(std::span<const Value> values) {
    add(static_cast<std::uint64_t>(values.size()));
    for (const Value value : values) add(value);
    return *this;
  }

  std::uint64_t value_ = 0xCBF2'9CE4'8422'2325;
};

}  // namespace waybill
