#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// Adjacent rows of a rank of which each has one copy, on the rank itself, adjacent in its window
/// too: their gradient is there already, and whole.
struct LocalRun {
  std::int64_t first_entry = 0;
  std::int64_t end_entry = 0;  ///< of entries between these some may have no rows
  std::int64_t row = 0;
  std::int64_t window_row = 0;
  std::int64_t rows = 0;
};

/// The runs of each part that are worth a copy of their own, in order: long ones, and only where
/// they are many bytes together. [parts]
[[nodiscard]] std::vector<std::vector<LocalRun>> long_local_runs(
    std::span<const SequencePart> parts, Rank rank);

/// The rows of the plan's windows that its local segments do not read.
[[nodiscard]] std::vector<StagedRows> rows_to_stage(const SequencePlan& plan);

}  // namespace waybill::detail
