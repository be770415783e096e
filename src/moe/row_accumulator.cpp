#include "moe/row_accumulator.h"

#include <algorithm>
#include <type_traits>

#include "core/float_convert.h"
#include "core/to_size.h"
#include "waybill/core/error.h"

namespace waybill {

using detail::to_size;

namespace {

/// Calls visit(i, element as float32; as float64 where that is the dtype) for each element of a
/// row.
template <class Visit>
void visit_row(const std::byte* row, DType dtype, std::size_t count, Visit&& visit) {
  if (dtype == DType::float64) {
    const auto* const elements = reinterpret_cast<const double*>(row);
    for (std::size_t i = 0; i < count; ++i) visit(i, elements[i]);
    return;
  }
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

RowAccumulator::RowAccumulator(std::int64_t hidden, DType dtype) : dtype_(dtype) {
  require(dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16 ||
              dtype == DType::float64,
          "RowAccumulator: dtype = ", dtype, ", expected float32, float16, bfloat16 or float64");
  if (dtype == DType::float64) {
    sums_.emplace<std::vector<double>>(to_size(hidden));
  } else {
    sums_.emplace<std::vector<float>>(to_size(hidden));
  }
}

void RowAccumulator::reset() {
  std::visit([](auto& sums) { std::ranges::fill(sums, 0); }, sums_);
}

void RowAccumulator::add(const std::byte* row) {
  std::visit(
      [&]<class Sum>(std::vector<Sum>& sums) {
        visit_row(row, dtype_, sums.size(),
                  [&](std::size_t i, auto value) { sums[i] += static_cast<Sum>(value); });
      },
      sums_);
}

void RowAccumulator::add_weighted(const std::byte* row, double weight) {
  std::visit(
      [&]<class Sum>(std::vector<Sum>& sums) {
        const auto factor = static_cast<Sum>(weight);
        visit_row(row, dtype_, sums.size(),
                  [&](std::size_t i, auto value) { sums[i] += static_cast<Sum>(value) * factor; });
      },
      sums_);
}

void RowAccumulator::add_rounded(const RowAccumulator& other) {
  const auto rounded = [&](auto value) {
    if constexpr (std::is_same_v<decltype(value), float>) {
      if (other.dtype_ == DType::bfloat16) return bfloat16_to_float(float_to_bfloat16(value));
      if (other.dtype_ == DType::float16) return float16_to_float(float_to_float16(value));
    }
    return value;
  };
  std::visit(
      [&]<class Sum>(std::vector<Sum>& sums, const auto& more) {
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<Sum>(rounded(more[i]));
      },
      sums_, other.sums_);
}

void RowAccumulator::write(std::byte* row) const {
  std::visit(
      [&]<class Sum>(const std::vector<Sum>& sums) {
        if (dtype_ == DType::float32 || dtype_ == DType::float64) {
          std::ranges::copy(sums, reinterpret_cast<Sum*>(row));
        } else if constexpr (std::is_same_v<Sum, float>) {
          auto* const elements = reinterpret_cast<std::uint16_t*>(row);
          std::ranges::transform(sums, elements,
                                 dtype_ == DType::bfloat16 ? float_to_bfloat16 : float_to_float16);
        }
      },
      sums_);
}

double weight_at(const std::byte* weights, std::int64_t idx, DType dtype) {
  double weight = 0;
  visit_row(weights + idx * dtype_bytes(dtype), dtype, 1,
            [&weight](std::size_t, auto value) { weight = value; });
  return weight;
}

}  // namespace waybill
