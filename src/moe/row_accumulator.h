#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "waybill/core/dtype.h"

namespace waybill {

/// Sums rows as combine does, in float32, or in float64 for float64 rows: from +0, every product
/// and every sum rounded, nothing fused. One object per thread.
class RowAccumulator {
 public:
  /// @param dtype float32, float16, bfloat16 or float64: of the rows and of what is written
  /// @throws InvalidArgument for another dtype
  RowAccumulator(std::int64_t hidden, DType dtype);

  void reset();
  void add(const std::byte* row);
  /// @param weight rounded to the dtype of the sums
  void add_weighted(const std::byte* row, double weight);
  /// Adds another's sums as they are rounded to its dtype.
  void add_rounded(const RowAccumulator& other);
  /// The sums, rounded to the dtype, nearest even. `row` may be one that was added.
  void write(std::byte* row) const;

 private:
  DType dtype_;
  std::variant<std::vector<float>, std::vector<double>> sums_;
};

/// One weight. @param dtype float32, float16, bfloat16 or float64
[[nodiscard]] double weight_at(const std::byte* weights, std::int64_t idx, DType dtype);

}  // namespace waybill
