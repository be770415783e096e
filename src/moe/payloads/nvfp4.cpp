#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "moe/payloads/quantizers.h"
#include "waybill/core/small_floats.h"

// nvfp4: e2m1, two elements per byte (the first in the low bits), an e4m3 scale for each 16
// elements, and a float32 for the row. An element's value is element * group scale * row scale.
//
// The recipe is NVIDIA's ("Pretraining Large Language Models with NVFP4", arXiv 2509.25149, the
// appendix on quantisation), with the row in place of the whole tensor, and in float32 throughout:
//   row scale   = max |x| of the row / 2688, where 2688 = 6 * 448 is the largest that a group holds
//   group scale = (max |x| of the group / 6) / row scale, rounded to e4m3
//   element     = x / (group scale * row scale), rounded to nearest, ties to even, max 6.
// Elements are 0 where the scale of the group or row is 0, or their product is. An infinity or a
// NaN in a group makes its scale NaN (0x7F) and its elements 0; the row's scale is that of the
// other groups.

namespace waybill::detail {
namespace {

constexpr std::size_t nvfp4_group = 16;
constexpr std::uint8_t nan_group = 0x7F;
constexpr float e2m1_values[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};

/// To nearest, ties to the even code; 6 at most. Not for NaN.
std::uint8_t float_to_e2m1(float value) {
  // Between one value and the next lies the middle: ties go to the even code.
  constexpr float middles[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5};
  const float size = std::fabs(value);
  unsigned code = 0;
  while (code < 7 && (size > middles[code] || (size == middles[code] && code % 2 == 1))) ++code;
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 8U : 0U));
}

float e2m1_to_float(unsigned code) {
  const float size = e2m1_values[code & 7U];
  return (code & 8U) != 0 ? -size : size;
}

float row_scale_of(std::span<const float> row) {
  float largest = 0;
  for (std::size_t first = 0; first < row.size(); first += nvfp4_group) {
    const float size = largest_of(row.subspan(first, nvfp4_group));
    if (std::isfinite(size)) largest = std::max(largest, size);
  }
  return largest / 2688.0F;
}

}  // namespace

void quantize_nvfp4(std::span<const float> row, std::span<std::uint8_t> elements,
                    std::span<std::uint8_t> scales) {
  const float row_scale = row_scale_of(row);
  std::ranges::fill(scales, std::uint8_t{0});
  std::memcpy(scales.data() + scales.size() - sizeof(row_scale), &row_scale, sizeof(row_scale));
  for (std::size_t first = 0; first < row.size(); first += nvfp4_group) {
    const float largest = largest_of(row.subspan(first, nvfp4_group));
    std::uint8_t group = nan_group;
    if (std::isfinite(largest)) {
      group = row_scale == 0 ? 0 : float_to_float8_e4m3fn(largest / 6.0F / row_scale);
    }
    scales[first / nvfp4_group] = group;
    const float unit = float8_e4m3fn_to_float(group) * row_scale;
    const auto code = [&](float x) -> unsigned {
      return unit > 0 ? float_to_e2m1(x / unit) : 0U;  // not of a NaN
    };
    for (std::size_t i = first; i < first + nvfp4_group; i += 2) {
      elements[i / 2] = static_cast<std::uint8_t>(code(row[i]) | code(row[i + 1]) << 4U);
    }
  }
}

void dequantize_nvfp4(std::span<const std::uint8_t> elements, std::span<const std::uint8_t> scales,
                      std::span<float> row) {
  float row_scale = 0;
  std::memcpy(&row_scale, scales.data() + scales.size() - sizeof(row_scale), sizeof(row_scale));
  for (std::size_t i = 0; i < row.size(); ++i) {
    const unsigned code = elements[i / 2] >> (i % 2 * 4U);
    const float unit = float8_e4m3fn_to_float(scales[i / nvfp4_group]) * row_scale;
    row[i] = e2m1_to_float(code) * unit;
  }
}

}  // namespace waybill::detail
