#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

// How each format quantises a row, and back: the specification. PayloadFormat says what the spans
// hold.

namespace waybill::detail {

void quantize_float8(std::span<const float> row, std::span<std::uint8_t> elements,
                     std::span<std::uint8_t> scales);
void dequantize_float8(std::span<const std::uint8_t> elements, std::span<const std::uint8_t> scales,
                       std::span<float> row);

void quantize_float8_ue8m0(std::span<const float> row, std::span<std::uint8_t> elements,
                           std::span<std::uint8_t> scales);
void dequantize_float8_ue8m0(std::span<const std::uint8_t> elements,
                             std::span<const std::uint8_t> scales, std::span<float> row);

void quantize_mxfp8(std::span<const float> row, std::span<std::uint8_t> elements,
                    std::span<std::uint8_t> scales);
void dequantize_mxfp8(std::span<const std::uint8_t> elements, std::span<const std::uint8_t> scales,
                      std::span<float> row);

void quantize_mxfp8_e5m2(std::span<const float> row, std::span<std::uint8_t> elements,
                         std::span<std::uint8_t> scales);
void dequantize_mxfp8_e5m2(std::span<const std::uint8_t> elements,
                           std::span<const std::uint8_t> scales, std::span<float> row);

void quantize_nvfp4(std::span<const float> row, std::span<std::uint8_t> elements,
                    std::span<std::uint8_t> scales);
void dequantize_nvfp4(std::span<const std::uint8_t> elements, std::span<const std::uint8_t> scales,
                      std::span<float> row);

/// The largest absolute value, +0 of an empty group; a positive quiet NaN where there is any.
[[nodiscard]] inline float largest_of(std::span<const float> group) {
  float largest = 0;
  for (const float element : group) {
    const float size = std::fabs(element);
    if (std::isnan(size)) return std::numeric_limits<float>::quiet_NaN();
    if (size > largest) largest = size;
  }
  return largest;
}

}  // namespace waybill::detail
