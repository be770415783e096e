#include "waybill/moe/quantize.h"

#include <cmath>
#include <cstring>

#include "core/number.h"
#include "core/to_size.h"
#include "waybill/core/error.h"
#include "waybill/moe/ep_config.h"

namespace waybill {

using detail::to_size;

namespace {

bool can_quantize(DType dtype) { return detail::is_summed(dtype) && dtype != DType::float64; }

float element_at(const void* row, std::size_t idx, DType dtype) {
  float element = 0;
  detail::for_number(dtype, [&]<class Number>(Number) {
    element =
        static_cast<float>(Number::load(static_cast<const typename Number::Stored*>(row)[idx]));
  });
  return element;
}

float largest_of(const void* row, std::size_t first, DType dtype) {
  float largest = 0;
  for (std::size_t i = 0; i < to_size(scale_group); ++i) {
    const float size = std::fabs(element_at(row, first + i, dtype));
    if (!(size <= largest)) largest = size;  // also when it is NaN
    if (std::isnan(largest)) break;
  }
  return largest;
}

}  // namespace

void quantize_row(const void* row, DType dtype, std::span<std::uint8_t> elements,
                  std::span<float> scales) {
  require(can_quantize(dtype), "quantize_row: dtype = ", dtype,
          ", expected float32, float16 or bfloat16");
  require(elements.size() == scales.size() * scale_group, "quantize_row: ", elements.size(),
          " elements for ", scales.size(), " scales, expected ", scale_group, " for each");
  for (std::size_t g = 0; g < scales.size(); ++g) {
    const std::size_t first = g * scale_group;
    const float scale = largest_of(row, first, dtype) * (1.0F / 448.0F);
    scales[g] = scale;
    for (std::size_t i = first; i < first + scale_group; ++i) {
      const float element = scale == 0 ? 0.0F : element_at(row, i, dtype) / scale;
      elements[i] = float_to_float8_e4m3fn(element);
    }
  }
}

void dequantize_row(std::span<const std::uint8_t> elements, std::span<const float> scales,
                    void* row, DType dtype) {
  require(can_quantize(dtype), "dequantize_row: dtype = ", dtype,
          ", expected float32, float16 or bfloat16");
  require(elements.size() == scales.size() * scale_group, "dequantize_row: ", elements.size(),
          " elements for ", scales.size(), " scales, expected ", scale_group, " for each");
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const float value = float8_e4m3fn_to_float(elements[i]) * scales[i / scale_group];
    detail::for_number(dtype, [&]<class Number>(Number) {
      static_cast<typename Number::Stored*>(row)[i] = Number::round(value);
    });
  }
}

}  // namespace waybill
