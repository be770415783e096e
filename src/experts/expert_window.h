#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "experts/expert_memory.h"
#include "waybill/moe/ep_config.h"

namespace waybill::detail {

/// One rank's dispatch window in host memory: where each part of a row lies.
class ExpertWindow {
 public:
  ExpertWindow(const EPConfig& config, const EPDispatchOptions& options, const ExpertMemory& memory,
               std::byte* base);

  [[nodiscard]] std::byte* row(std::int64_t idx) const { return rows_ + idx * row_bytes_; }
  [[nodiscard]] std::byte* scales(std::int64_t idx) const { return scales_ + idx * scale_bytes_; }
  /// Of grouped rows; of compact rows the first of topk.
  [[nodiscard]] std::byte* weights(std::int64_t idx) const {
    return weights_ + idx * weights_per_row_ * weight_bytes_;
  }
  [[nodiscard]] RowTag& tag(std::int64_t idx) const { return tags_[idx]; }
  [[nodiscard]] std::int32_t* topk(std::int64_t idx) const { return topk_ + idx * topk_per_row_; }

  /// Makes a row one of padding.
  void clear(std::int64_t idx, bool has_weights) const;
  /// Copies payload and scales of one row to another.
  void copy(std::int64_t from, std::int64_t to) const;

  [[nodiscard]] std::int64_t row_bytes() const { return row_bytes_; }
  [[nodiscard]] std::int64_t scale_bytes() const { return scale_bytes_; }
  [[nodiscard]] std::int64_t weight_bytes() const { return weight_bytes_; }
  [[nodiscard]] std::int64_t weights_per_row() const { return weights_per_row_; }

 private:
  std::int64_t row_bytes_;
  std::int64_t scale_bytes_;   ///< of a row
  std::int64_t weight_bytes_;  ///< of one weight
  std::int64_t weights_per_row_;
  std::int64_t topk_per_row_;
  std::byte* rows_;
  std::byte* scales_;
  std::byte* weights_;
  RowTag* tags_;
  std::int32_t* topk_;
};

/// The tokens of one source on their way: contiguous, in the form in which they travel.
struct TokenBlock {
  std::int32_t source_rank = 0;
  const std::byte* rows = nullptr;            ///< [T, row_bytes]
  const std::byte* scales = nullptr;          ///< [T, num_scales] float32
  const std::byte* weights = nullptr;         ///< [T, K]; null without
  std::span<const std::int32_t> ids = {};     ///< [T, K]
  std::span<const std::int32_t> places = {};  ///< [T, K]
};

/// Writes tokens into the windows of this rank's node: the payload once per rank, to the row of the
/// first topk slot there; tags and weights to the row of each topk slot. Rows past the capacity
/// stay out.
/// @param windows by local rank
void deliver(const EPConfig& config, const EPDispatchOptions& options, std::int64_t capacity_rows,
             std::span<const ExpertWindow> windows, const TokenBlock& block);

}  // namespace waybill::detail
