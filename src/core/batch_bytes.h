#pragma once

#include <algorithm>
#include <cstdint>

namespace waybill::detail {

/// Bytes of a batch of rows that others forward, if a rank sends them `total_bytes` in all. Batches
/// are short, so that the ranks after it begin early; each is a message
/// (docs/performance/gpu_sequences.md).
[[nodiscard]] constexpr std::int64_t usual_batch_bytes(std::int64_t total_bytes) {
  constexpr std::int64_t batches = 16;
  constexpr std::int64_t kib = 1024;
  return std::clamp(total_bytes / batches, 256 * kib, 2048 * kib);
}

/// The most that one put over a network carries.
inline constexpr std::int64_t max_put_bytes = std::int64_t{256} << 10;

}  // namespace waybill::detail
