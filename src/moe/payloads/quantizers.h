#pragma once

#include <cmath>
#include <cstdint>
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

/// The largest absolute value, +0 of an empty group; the first NaN where there is one.
[[nodiscard]] inline float largest_of(std::span<const float> group) {
  float largest = 0;
  for (const float element : group) {
    const float size = std::fabs(element);
    if (!(size <= largest)) largest = size;  // also when it is NaN
    if (std::isnan(largest)) break;
  }
  return largest;
}

}  // namespace waybill::detail
