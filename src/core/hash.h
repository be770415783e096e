#pragma once

#include <cstdint>
#include <span>

namespace waybill {

/// A hash of what is added, one after another; the same on every machine. FNV-1a over words of 64
/// bits, each mixed as in splitmix64.
class Hash {
 public:
  Hash& add(std::uint64_t value);
  Hash& add(std::int64_t value) { return add(static_cast<std::uint64_t>(value)); }
  Hash& add(std::int32_t value) { return add(static_cast<std::int64_t>(value)); }
  Hash& add(bool value) { return add(std::uint64_t{value ? 1U : 0U}); }
  Hash& add(double value);
  Hash& add(std::span<const std::int64_t> values);
  Hash& add(std::span<const std::int32_t> values);
  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  std::uint64_t value_ = 0xCBF2'9CE4'8422'2325;
};

}  // namespace waybill
