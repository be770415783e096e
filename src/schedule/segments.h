#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// Bytes of a row of all tensors of the part.
[[nodiscard]] std::int64_t row_bytes_of(const SequencePart& part);

/// The format in which rows are added up: float32, float64 for float64.
[[nodiscard]] TensorFormat sum_format(const TensorFormat& format);

/// How rows are cut into chunks of at most `chunk_bytes`.
[[nodiscard]] RowCut cut_rows(std::int64_t row_bytes, std::int64_t chunk_bytes);

/// Rows of a part's tensors in the windows of all ranks: for each part [W].
using PartRows = std::vector<std::vector<std::int64_t>>;

/// Places the tensors of a call in the windows of all ranks and after them, as tensor
/// `num_tensors + t`, the sums on the way of tensor t.
class WindowMap {
 public:
  /// @param sums rows of the sums on the way; empty: none
  /// @throws InvalidArgument when a window would need 2^`bits` bytes.
  WindowMap(const char* who, std::span<const SequencePart> parts, const PartRows& rows,
            const PartRows& sums = {}, int bits = address_rank_shift);

  [[nodiscard]] std::int64_t offset(std::size_t tensor, std::int32_t rank) const {
    return offsets_[tensor][rank];
  }
  /// A row of a tensor in the window of `rank`; the address of a sum says that it is one.
  [[nodiscard]] std::uint64_t address(std::size_t tensor, std::int32_t rank,
                                      std::int64_t row) const {
    return static_cast<std::uint64_t>(rank) << address_rank_shift |
           static_cast<std::uint64_t>(offset(tensor, rank) + row * row_bytes_[tensor]) |
           (tensor >= first_sum_ ? address_sum_bit : 0);
  }
  [[nodiscard]] std::int64_t largest() const;

  /// The offsets of all tensors in the window of the plan's rank.
  void write_offsets(SequencePlan& plan) const;

  /// Makes room after the tensors of each rank's window. [W]
  /// @return where it begins in the window of `rank`
  /// @throws InvalidArgument as above
  std::int64_t add_stage(const char* who, std::span<const std::int64_t> size_bytes,
                         std::int32_t rank);

 private:
  void add(const char* who, const TensorFormat& format, std::span<const std::int64_t> rows);
  void take(const char* who, std::size_t rank, std::int64_t bytes);

  PartRows offsets_;                     ///< [tensors][W]
  std::vector<std::int64_t> row_bytes_;  ///< [tensors]
  std::size_t first_sum_ = 0;            ///< the first tensor that is of sums
  std::vector<std::int64_t> used_;       ///< [W]
  int bits_;
};

/// Rows of all tensors of a part on their way to one place of a window.
struct RowMove {
  std::int32_t tensor = 0;       ///< first of the part
  std::int32_t num_tensors = 0;  ///< as many as the part has: all go the same way
  std::int64_t row = 0;          ///< in this rank's tensor, or in its window
  std::int64_t rows = 0;
  std::int32_t dst_rank = 0;
  std::int64_t dst_row = 0;
};

/// Distance of a rank from the next one after `from`: 0 for that, W - 1 for `from`.
[[nodiscard]] inline std::int32_t distance(std::int32_t from, std::int32_t to,
                                           std::int32_t world_size) {
  const std::int32_t steps = to - from - 1;
  return steps < 0 ? steps + world_size : steps;
}

/// Appends a segment: row, rows, tensor, bucket and first_chunk are set. @return its chunks
std::int64_t append_segment(SequencePlan& plan, RowSegment segment,
                            std::span<const std::uint64_t> addresses);

/// Appends rows that stay on the rank to the local segments.
void append_local(SequencePlan& plan, const WindowMap& windows, const RowMove& move);

/// Whether rows that stay on the rank are worth a call to the copy engine of their own.
[[nodiscard]] bool separates_local_rows(std::span<const SequencePart> parts, Rank rank,
                                        std::int32_t num_sms);

/// @throws InvalidArgument for 2^31 chunks or addresses
void check_chunk_numbers(const SequencePlan& plan);

/// Fills the tables of a plan in which every rank is reached by load and store.
/// @param needed rows of the windows
void compile_direct(const char* who, std::span<const SequencePart> parts, const PartRows& needed,
                    const CompileOptions& options, SequencePlan& plan);

/// The rows of the plan's windows that its local segments do not read.
[[nodiscard]] std::vector<RowSegment> rows_to_stage(const SequencePlan& plan);

}  // namespace waybill::detail
