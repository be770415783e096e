#pragma once

#include <bit>
#include <cstdint>

#include "waybill/core/host_tensor.h"

namespace waybill {

// Floats of 16 and 8 bits, held as their bits, as in the elements of a HostTensor.

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

/// float8 e5m2 to float32: the upper half of a float16. Exact.
[[nodiscard]] inline float float8_e5m2_to_float(std::uint8_t bits) noexcept {
  return float16_to_float(static_cast<std::uint16_t>(bits << 8));
}

/// float32 to float8 e5m2, to nearest, ties to even; 61440 and more in size become infinity. NaN is
/// 0x7F.
[[nodiscard]] inline std::uint8_t float_to_float8_e5m2(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  const auto result = [sign](std::uint32_t code) { return static_cast<std::uint8_t>(sign | code); };
  if (magnitude > 0x7F800000U) return 0x7FU;
  if (magnitude >= 0x47700000U) return result(0x7CU);  // 61440: the middle of 57344 and 65536
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 2^7 puts the unit of the last place at 2^-16, so the sum rounds as
    // wanted.
    const float rounded = std::bit_cast<float>(magnitude) + 0x1p7F;
    return result(std::bit_cast<std::uint32_t>(rounded) - 0x43000000U);
  }
  return result((magnitude - 0x38000000U + 0xFFFFFU + ((magnitude >> 21) & 1U)) >> 21);
}

/// Writes the elements of `from` in the dtype of `to`, rounded as by the functions above: float32,
/// bfloat16, float16, float8_e4m3fn or float8_e5m2 each.
/// @param from, to contiguous views of one shape; not the same memory, unless they are one view
/// @throws InvalidArgument for other dtypes, and for views of different shapes
void convert_floats(const ConstTensorView& from, const TensorView& to);

}  // namespace waybill
