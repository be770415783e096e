#include <cstring>

#include "moe/payloads/quantizers.h"
#include "waybill/core/small_floats.h"

// float8: e4m3 with a float32 scale for each 128 elements, as in Triton-distributed and DeepEP.
// scale = max |x| * (1/448), rounded to float32; element = x / scale in float32, rounded to the
// nearest e4m3 (ties to even), 448 at most. A group of zeros has scale 0 and elements 0 (the
// original: NaN). A NaN makes the group's scale (0x7FC00000), and all its elements (0x7F), NaN.

namespace waybill::detail {
namespace {

constexpr std::size_t float8_group = 128;

}  // namespace

void quantize_float8(std::span<const float> row, std::span<std::uint8_t> elements,
                     std::span<std::uint8_t> scales) {
  for (std::size_t first = 0; first < row.size(); first += float8_group) {
    const float scale = largest_of(row.subspan(first, float8_group)) * (1.0F / 448.0F);
    std::memcpy(scales.data() + first / float8_group * sizeof(scale), &scale, sizeof(scale));
    for (std::size_t i = first; i < first + float8_group; ++i) {
      elements[i] = float_to_float8_e4m3fn(scale == 0 ? 0.0F : row[i] / scale);
    }
  }
}

void dequantize_float8(std::span<const std::uint8_t> elements, std::span<const std::uint8_t> scales,
                       std::span<float> row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    float scale = 0;
    std::memcpy(&scale, scales.data() + i / float8_group * sizeof(scale), sizeof(scale));
    row[i] = float8_e4m3fn_to_float(elements[i]) * scale;
  }
}

}  // namespace waybill::detail
