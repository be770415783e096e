#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "waybill/core/dtype.h"

namespace waybill::detail {

/// The dtype in which gradients of copies are added, and travel: float32, float64 for float64.
[[nodiscard]] constexpr DType gradient_sum_dtype(DType home) {
  return home == DType::float64 ? DType::float64 : DType::float32;
}

/// Adds the gradients of one tensor of an expert: home's first, then what copies bring, in the
/// order of the calls. Rounded once.
class GradientSum {
 public:
  /// Takes home's gradient. @param dtype of home: one that is summed
  void begin(const std::byte* home, std::int64_t elements, DType dtype);
  /// Adds elements of a copy, of gradient_sum_dtype, from element `first` on.
  void add(const std::byte* copy, std::int64_t first, std::int64_t count);
  /// Writes the sums, rounded to home's dtype.
  void write(std::byte* home) const;

 private:
  DType dtype_ = DType::float32;
  std::variant<std::vector<float>, std::vector<double>> sums_;
};

}  // namespace waybill::detail
