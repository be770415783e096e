#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan_checks.h"
#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// @throws InvalidArgument for 2^31 chunks or addresses
void check_chunk_numbers(const SequencePlan& plan);

/// Writes the entries of this rank as segments, and counts the chunks that they will be cut into.
class SegmentWriter {
 public:
  /// @param separate_local_copies dispatch: rows that stay on this rank go to plan.local_segments
  SegmentWriter(SequencePlan& plan, const WindowMap& windows, bool separate_local_copies);

  void begin_part(const SequencePart& part, std::int32_t first_tensor);

  /// An entry of this rank: its rows and their copies (rank, first row there).
  void add_entry(std::int64_t row, std::int64_t rows, std::span<const std::int32_t> ranks,
                 std::span<const std::int64_t> offsets);

  /// Rows that stay, as local segments.
  void add_local(std::int64_t row, std::int64_t rows, std::int64_t window_row);

  /// @throws InvalidArgument for 2^31 chunks or addresses
  void finish() const { check_chunk_numbers(plan_); }

 private:
  struct Copy {
    std::int32_t distance;  ///< from rank + 1: 0 is the next rank, W - 1 this one
    std::int32_t rank;
    std::int64_t row;
  };

  void read_copies(std::span<const std::int32_t> ranks, std::span<const std::int64_t> offsets);
  void add_group(std::int64_t row, std::int64_t rows, std::span<const Copy> copies, bool local);

  SequencePlan& plan_;
  const WindowMap& windows_;
  bool separates_local_;
  std::int64_t num_formats_ = 0;
  std::int32_t first_tensor_ = 0;
  std::vector<Copy> copies_;
};

/// How rows are cut into chunks of at most `chunk_bytes`.
[[nodiscard]] RowCut cut_rows(std::int64_t row_bytes, std::int64_t chunk_bytes);

}  // namespace waybill::detail
