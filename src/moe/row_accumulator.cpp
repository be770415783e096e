#include "moe/row_accumulator.h"

#include <algorithm>

#include "waybill/core/error.h"
#include "waybill/core/float_convert.h"
#include "waybill/core/to_size.h"

namespace waybill {

using detail::to_size;

namespace {

/// Calls visit(i, element as float32) for each element of a row.
template <class Visit>
void visit_row(const std::byte* row, DType dtype, std::size_t count, Visit&& visit) {
  if (dtype == DType::float32) {
    const auto* const elements = reinterpret_cast<const float*>(row);
    for (std::size_t i = 0; i < count; ++i) visit(i, elements[i]);
    return;
  }
  const auto* const elements = reinterpret_cast<const std::uint16_t*>(row);
  if (dtype == DType::bfloat16) {
    for (std::size_t i = 0; i < count; ++i) visit(i, bfloat16_to_float(elements[i]));
  } else {
    for (std::size_t i = 0; i < count; ++i) visit(i, float16_to_float(elements[i]));
  }
}

}  // namespace

RowAccumulator::RowAccumulator(std::int64_t hidden, DType dtype)
    : dtype_(dtype), sums_(to_size(hidden)) {
  require(dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16,
          "RowAccumulator: dtype = ", dtype, ", expected float32, float16 or bfloat16");
}

void RowAccumulator::reset() { std::ranges::fill(sums_, 0.0F); }

void RowAccumulator::add(const std::byte* row) {
  visit_row(row, dtype_, sums_.size(), [this](std::size_t i, float value) { sums_[i] += value; });
}

void RowAccumulator::add_weighted(const std::byte* row, float weight) {
  visit_row(row, dtype_, sums_.size(),
            [this, weight](std::size_t i, float value) { sums_[i] += value * weight; });
}

void RowAccumulator::add_rounded(const RowAccumulator& other) {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    float value = other.sums_[i];
    if (other.dtype_ == DType::bfloat16) value = bfloat16_to_float(float_to_bfloat16(value));
    if (other.dtype_ == DType::float16) value = float16_to_float(float_to_float16(value));
    sums_[i] += value;
  }
}

void RowAccumulator::write(std::byte* row) const {
  if (dtype_ == DType::float32) {
    std::ranges::copy(sums_, reinterpret_cast<float*>(row));
    return;
  }
  auto* const elements = reinterpret_cast<std::uint16_t*>(row);
  if (dtype_ == DType::bfloat16) {
    std::ranges::transform(sums_, elements, float_to_bfloat16);
  } else {
    std::ranges::transform(sums_, elements, float_to_float16);
  }
}

float weight_at(const std::byte* weights, std::int64_t idx, DType dtype) {
  float weight = 0;
  visit_row(weights + idx * dtype_bytes(dtype), dtype, 1,
            [&weight](std::size_t, float value) { weight = value; });
  return weight;
}

}  // namespace waybill
