#pragma once

#include <bit>
#include <cstdint>

namespace waybill {

/// bfloat16 to float32. Exact.
[[nodiscard]] inline float bfloat16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// float32 to bfloat16, to nearest, ties to even. NaN stays NaN (quiet, sign and top bits kept).
[[nodiscard]] inline std::uint16_t float_to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

/// float16 (IEEE binary16) to float32. Exact; a NaN becomes quiet.
[[nodiscard]] inline float float16_to_float(std::uint16_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t magnitude = bits & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinity, NaN
    const std::uint32_t quiet = magnitude > 0x7C00U ? 0x400000U : 0U;
    return std::bit_cast<float>(sign | 0x7F800000U | quiet | ((magnitude & 0x3FFU) << 13));
  }
  if (magnitude < 0x400U) {  // zero and subnormals: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude + 0x1C000U) << 13));  // exponent bias 15 -> 127
}

/// float32 to float16, to nearest, ties to even; 65520 and more in size become infinity, NaN a
/// quiet NaN.
[[nodiscard]] inline std::uint16_t float_to_float16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  const auto result = [sign](std::uint32_t half) {
    return static_cast<std::uint16_t>(sign | half);
  };
  if (magnitude > 0x7F800000U) return result(0x7E00U | ((magnitude >> 13) & 0x1FFU));
  if (magnitude >= 0x477FF000U) return result(0x7C00U);
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 0.5 puts the unit of the last place at 2^-24, so the sum rounds as
    // wanted.
    const float rounded = std::bit_cast<float>(magnitude) + 0.5F;
    return result(std::bit_cast<std::uint32_t>(rounded) - 0x3F000000U);
  }
  return result((magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13);
}

}  // namespace waybill
