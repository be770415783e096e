#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <vector>

#include "waybill/core/dtype.h"

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

namespace waybill::detail {

// How each dtype that is summed is stored, and what it is summed in: device/number.cuh has the same
// for the device.

struct Float32 {
  static constexpr DType dtype = DType::float32;
  using Stored = float;
  using Sum = float;
  static Sum load(Stored value) noexcept { return value; }
  static Stored round(Sum value) noexcept { return value; }
};

struct Float64 {
  static constexpr DType dtype = DType::float64;
  using Stored = double;
  using Sum = double;
  static Sum load(Stored value) noexcept { return value; }
  static Stored round(Sum value) noexcept { return value; }
};

struct BFloat16 {
  static constexpr DType dtype = DType::bfloat16;
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored value) noexcept { return bfloat16_to_float(value); }
  static Stored round(Sum value) noexcept { return float_to_bfloat16(value); }
};

struct Float16 {
  static constexpr DType dtype = DType::float16;
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored value) noexcept { return float16_to_float(value); }
  static Stored round(Sum value) noexcept { return float_to_float16(value); }
};

/// Calls `use` with the number of a dtype that is summed; not for other dtypes.
/// @return whether it is one
template <class Use>
bool for_number(DType dtype, Use&& use) {
  switch (dtype) {
    case DType::float32:
      use(Float32{});
      return true;
    case DType::float64:
      use(Float64{});
      return true;
    case DType::bfloat16:
      use(BFloat16{});
      return true;
    case DType::float16:
      use(Float16{});
      return true;
    default:
      return false;
  }
}

[[nodiscard]] inline bool is_summed(DType dtype) {
  return for_number(dtype, [](auto /*number*/) {});
}

/// The names that dtype_from_name takes: of every dtype, and the shorter ones that some have, too.
[[nodiscard]] std::vector<std::string_view> dtype_names();
[[nodiscard]] std::vector<std::string_view> short_dtype_names();

}  // namespace waybill::detail
