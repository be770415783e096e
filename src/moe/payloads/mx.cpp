#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "moe/payloads/quantizers.h"
#include "waybill/core/small_floats.h"

// Formats whose scales are powers of two (UE8M0: 2^(code - 127), 0xFF is NaN).
//
// mxfp8 is MXFP8 of the OCP Microscaling Formats (MX) specification 1.0. Scales are those of
// section 6.3, "conversion from a vector of scalars": the largest power of two at most max |x|,
// divided by the largest power of two of the element's format (2^8 for e4m3, 2^15 for e5m2).
// Elements are x / scale, rounded to nearest, ties to even; larger ones are the largest normal
// number, as section 6.3 asks.
//
// float8_ue8m0 has the scale of DeepGEMM and DeepEP: the least power of two with which no element
// of the group is larger than 448.
//
// In both, the least scale is 2^-127, also of a group of zeros. An infinity or a NaN in a group
// makes its scale, and all its elements, NaN (0xFF, 0x7F): section 6.3 leaves that open.

namespace waybill::detail {
namespace {

constexpr std::uint8_t nan_scale = 0xFF;
constexpr std::uint8_t nan_element = 0x7F;  // e4m3 and e5m2 have the same

float scale_value(std::uint8_t code) {
  if (code == nan_scale) return std::bit_cast<float>(0x7FC00000U);
  return code == 0 ? 0x1p-127F : std::bit_cast<float>(std::uint32_t{code} << 23);
}

/// x / 2^(code - 127), which is x times a power of two that is a float32, too.
float divided(float x, std::uint8_t code) {
  const int exponent = 127 - static_cast<int>(code);
  return std::ldexp(x, exponent);
}

struct E4m3 {
  static constexpr unsigned largest_exponent = 8;
  static constexpr std::uint32_t largest_fraction = 0x600000;  // 448 = 1.75 * 2^8
  static std::uint8_t round(float value) { return float_to_float8_e4m3fn(value); }
  static float load(std::uint8_t code) { return float8_e4m3fn_to_float(code); }
};

struct E5m2 {
  static constexpr unsigned largest_exponent = 15;
  static constexpr std::uint32_t largest_fraction = 0x600000;  // 57344 = 1.75 * 2^15
  static std::uint8_t round(float value) {
    return float_to_float8_e5m2(std::clamp(value, -57344.0F, 57344.0F));
  }
  static float load(std::uint8_t code) { return float8_e5m2_to_float(code); }
};

/// @tparam Fits the scale is as large as it must be for all elements to fit
template <class Element, bool Fits>
std::uint8_t scale_of(float largest) {
  const auto bits = std::bit_cast<std::uint32_t>(largest);
  if (bits >= 0x7F800000U) return nan_scale;
  std::uint32_t exponent = bits >> 23;
  if (Fits && (bits & 0x7FFFFFU) > Element::largest_fraction) ++exponent;
  return static_cast<std::uint8_t>(exponent - std::min(exponent, Element::largest_exponent));
}

template <class Element, std::size_t Size, bool Fits>
void quantize(std::span<const float> row, std::span<std::uint8_t> elements,
              std::span<std::uint8_t> scales) {
  for (std::size_t first = 0; first < row.size(); first += Size) {
    const std::uint8_t scale = scale_of<Element, Fits>(largest_of(row.subspan(first, Size)));
    scales[first / Size] = scale;
    for (std::size_t i = first; i < first + Size; ++i) {
      elements[i] = scale == nan_scale ? nan_element : Element::round(divided(row[i], scale));
    }
  }
}

template <class Element, std::size_t Size>
void dequantize(std::span<const std::uint8_t> elements, std::span<const std::uint8_t> scales,
                std::span<float> row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = Element::load(elements[i]) * scale_value(scales[i / Size]);
  }
}

}  // namespace

void quantize_float8_ue8m0(std::span<const float> row, std::span<std::uint8_t> elements,
                           std::span<std::uint8_t> scales) {
  quantize<E4m3, 128, true>(row, elements, scales);
}

void dequantize_float8_ue8m0(std::span<const std::uint8_t> elements,
                             std::span<const std::uint8_t> scales, std::span<float> row) {
  dequantize<E4m3, 128>(elements, scales, row);
}

void quantize_mxfp8(std::span<const float> row, std::span<std::uint8_t> elements,
                    std::span<std::uint8_t> scales) {
  quantize<E4m3, 32, false>(row, elements, scales);
}

void dequantize_mxfp8(std::span<const std::uint8_t> elements, std::span<const std::uint8_t> scales,
                      std::span<float> row) {
  dequantize<E4m3, 32>(elements, scales, row);
}

void quantize_mxfp8_e5m2(std::span<const float> row, std::span<std::uint8_t> elements,
                         std::span<std::uint8_t> scales) {
  quantize<E5m2, 32, false>(row, elements, scales);
}

void dequantize_mxfp8_e5m2(std::span<const std::uint8_t> elements,
                           std::span<const std::uint8_t> scales, std::span<float> row) {
  dequantize<E5m2, 32>(elements, scales, row);
}

}  // namespace waybill::detail
