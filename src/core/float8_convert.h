#pragma once

#include <bit>
#include <cstdint>

namespace waybill {

/// float8 e4m3fn to float32. Exact. 0x7F and 0xFF are NaN; there is no infinity.
[[nodiscard]] inline float float8_e4m3fn_to_float(std::uint8_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80U) << 24;
  const std::uint32_t magnitude = bits & 0x7FU;
  if (magnitude == 0x7FU) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (magnitude < 8U) {  // zero and subnormals: a multiple of 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude + 0x3C0U) << 20));  // exponent bias 7 -> 127
}

/// float32 to float8 e4m3fn, to nearest, ties to even; beyond 448 it stays 448, also for infinity.
/// NaN is 0x7F.
[[nodiscard]] inline std::uint8_t float_to_float8_e4m3fn(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  const auto result = [sign](std::uint32_t code) { return static_cast<std::uint8_t>(sign | code); };
  if (magnitude > 0x7F800000U) return 0x7FU;
  if (magnitude >= 0x43E00000U) return result(0x7EU);  // 448 and more
  if (magnitude < 0x3C800000U) {
    // Below 2^-6: adding 2^14 puts the unit of the last place at 2^-9, so the sum rounds as wanted.
    const float rounded = std::bit_cast<float>(magnitude) + 0x1p14F;
    return result(std::bit_cast<std::uint32_t>(rounded) - 0x46800000U);
  }
  return result((magnitude - 0x3C000000U + 0x7FFFFU + ((magnitude >> 20) & 1U)) >> 20);
}

}  // namespace waybill
