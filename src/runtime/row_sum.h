#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "waybill/core/dtype.h"

namespace waybill::detail {

/// Adds up equal runs of elements: `out[i]` is the sum of `sources[k][i]` in the order of k, in
/// float32 (float64 for float64), rounded once. One source alone keeps its bits where the dtypes
/// are the same; none gives 0.
using SumRuns = void (*)(std::span<const std::byte* const> sources, std::byte* out,
                         std::int64_t num_elements);

/// Null for dtypes that do not go together.
[[nodiscard]] SumRuns sum_runs_of(DType from, DType to);

}  // namespace waybill::detail
