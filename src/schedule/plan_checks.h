#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// Tables that fit each other, ranks and offsets in range, one world. @throws InvalidArgument
void check_parts(const char* who, std::span<const SequencePart> parts, Rank rank);

/// All that sums of rows and bytes of a call can come to, with room for sums that are wider.
inline constexpr double most_call_bytes = 0x1p60;

/// Bytes of all copies of all ranks in bounds, so that no sum of some of them overflows.
/// @throws InvalidArgument
void check_traffic(const char* who, std::span<const SequencePart> parts);

/// Rows that each rank's window has of the part's tensors: every copy has room. [W]
[[nodiscard]] std::vector<std::int64_t> rows_needed(const SequencePart& part);

/// What rows of a format are added up in: float32, float64 for float64.
[[nodiscard]] TensorFormat sum_format(const TensorFormat& format);

/// Rows of a part's tensors in the windows of all ranks.
struct WindowRows {
  std::vector<std::int64_t> tensor;  ///< [W] with those that only pass through
  std::vector<std::int64_t> sums;    ///< [W] of the sums on the way; empty: none
};

/// Where the tensors of a call lie in the windows of all ranks, and behind them, tensor
/// `num_tensors + t`, the sums on the way of tensor t.
class WindowMap {
 public:
  /// @throws InvalidArgument when a window would need 2^`bits` bytes.
  WindowMap(const char* who, std::span<const SequencePart> parts, std::span<const WindowRows> rows,
            int bits = address_rank_shift);

  [[nodiscard]] std::int64_t offset(std::size_t tensor, std::int32_t rank) const {
    return offsets_[tensor][rank];
  }
  [[nodiscard]] std::size_t num_tensors() const { return offsets_.size(); }
  [[nodiscard]] std::int64_t largest() const;

  /// Room behind the tensors of each rank's window. [W]
  /// @return where it begins in the window of `rank`
  /// @throws InvalidArgument as above
  std::int64_t add_stage(const char* who, std::span<const std::int64_t> size_bytes,
                         std::int32_t rank);

 private:
  void add(const char* who, const TensorFormat& format, std::span<const std::int64_t> rows);
  void take(const char* who, std::size_t rank, std::int64_t bytes);

  std::vector<std::vector<std::int64_t>> offsets_;  ///< [tensors][W]
  std::vector<std::int64_t> used_;                  ///< [W]
  int bits_;
};

}  // namespace waybill::detail
