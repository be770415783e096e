#include "waybill/moe/quantize.h"

#include <cmath>
#include <cstring>

#include "core/number.h"
#include "waybill/core/error.h"
#include "waybill/moe/ep_config.h"

namespace waybill {
namespace {

void check_sizes(const char* who, DType dtype, std::size_t elements, std::size_t scales) {
  require(detail::is_summed(dtype) && dtype != DType::float64, who, ": dtype = ", dtype,
          ", expected float32, float16 or bfloat16");
  require(elements == scales * scale_group, who, ": ", elements, " elements for ", scales,
          " scales, expected ", scale_group, " for each");
}

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
  for (std::int64_t i = 0; i < scale_group; ++i) {
    const float size = std::fabs(element_at(row, first + i, dtype));
    if (!(size <= largest)) largest = size;  // also when it is NaN
    if (std::isnan(largest)) break;
  }
  return largest;
}

}  // namespace

void quantize_row(const void* row, DType dtype, std::span<std::uint8_t> elements,
                  std::span<float> scales) {
  check_sizes("quantize_row", dtype, elements.size(), scales.size());
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
  check_sizes("dequantize_row", dtype, elements.size(), scales.size());
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const float value = float8_e4m3fn_to_float(elements[i]) * scales[i / scale_group];
    detail::for_number(dtype, [&]<class Number>(Number) {
      static_cast<typename Number::Stored*>(row)[i] = Number::round(value);
    });
  }
}

}  // namespace waybill
