#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "waybill/core/dtype.h"

namespace waybill::detail {

/// A run of elements to be added: rows, or sums of rows as they are made on the way.
struct SumAddend {
  const std::byte* data = nullptr;
  bool is_sum = false;  ///< has the type that sums are made in
};

/// Adds up equal runs of elements: `out[i]` is the sum of `addends[k][i]` in the order of k, in
/// float32 (float64 for float64), rounded once. One addend alone keeps its bits where it has the
/// output's dtype; none gives 0.
/// @param from dtype of addends that are no sums; `to` of the output, see can_sum
void sum_runs(std::span<const SumAddend> addends, DType from, DType to, std::byte* out,
              std::int64_t num_elements);

/// Whether rows of a dtype can be summed into another: the same, or float32 for 16-bit ones.
[[nodiscard]] bool can_sum(DType from, DType to);

}  // namespace waybill::detail
