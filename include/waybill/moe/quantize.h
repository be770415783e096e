#pragma once

#include <cstdint>
#include <span>

#include "waybill/core/dtype.h"

namespace waybill {

/// Quantises one row to float8_e4m3fn with a float32 scale for each scale_group elements:
/// scale = max |x| * (1/448), rounded to float32; element = x / scale in float32, rounded to the
/// nearest e4m3 (ties to even), 448 at most. A group of zeros has scale 0 and elements 0 (the
/// original: NaN). A NaN makes the group's scale, and all its elements, NaN (0x7F).
/// @param row `scales.size()` * scale_group elements of float32, float16 or bfloat16
void quantize_row(const void* row, DType dtype, std::span<std::uint8_t> elements,
                  std::span<float> scales);

/// The inverse: element times scale in float32, rounded to `dtype`.
void dequantize_row(std::span<const std::uint8_t> elements, std::span<const float> scales,
                    void* row, DType dtype);

}  // namespace waybill
