#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/core/at.h"
#include "waybill/runtime/sequence_plan.h"

namespace waybill::detail {

/// Tables that fit each other, ranks and offsets in range, one world. @throws InvalidArgument
void check_parts(const char* who, std::span<const SequencePart> parts, Rank rank);

/// Where the tensors of a call lie in the windows of all ranks.
class WindowMap {
 public:
  /// @throws InvalidArgument when a window would need 2^44 bytes.
  WindowMap(const char* who, std::span<const SequencePart> parts);

  [[nodiscard]] std::int64_t rows(std::size_t tensor, std::int32_t rank) const {
    return rows_[tensor_part_[tensor]][at(rank)];
  }
  [[nodiscard]] std::int64_t offset(std::size_t tensor, std::int32_t rank) const {
    return offsets_[tensor][at(rank)];
  }
  [[nodiscard]] std::span<const std::int64_t> offsets(std::size_t tensor) const {
    return offsets_[tensor];
  }
  [[nodiscard]] std::int64_t largest() const { return largest_; }

 private:
  std::vector<std::vector<std::int64_t>> rows_;     ///< [parts][W]
  std::vector<std::vector<std::int64_t>> offsets_;  ///< [tensors][W]
  std::vector<std::size_t> tensor_part_;
  std::int64_t largest_ = 0;
};

}  // namespace waybill::detail
