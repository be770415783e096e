#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "waybill/core/dtype.h"

namespace waybill {

/// Sums rows in float32 as combine does: from +0, every product and every sum rounded, nothing
/// fused. One object a thread.
class RowAccumulator {
 public:
  /// @param dtype float32, float16 or bfloat16: of the rows and of what is written
  /// @throws InvalidArgument for another dtype
  RowAccumulator(std::int64_t hidden, DType dtype);

  void reset();
  void add(const std::byte* row);
  void add_weighted(const std::byte* row, float weight);
  /// Adds another's sums as they are rounded to its dtype.
  void add_rounded(const RowAccumulator& other);
  /// The sums, rounded to the dtype, nearest even. `row` may be one that was added.
  void write(std::byte* row) const;

 private:
  DType dtype_;
  std::vector<float> sums_;
};

/// One weight as float32. @param dtype float32, float16 or bfloat16
[[nodiscard]] float weight_at(const std::byte* weights, std::int64_t idx, DType dtype);

}  // namespace waybill
