#pragma once

#include <algorithm>
#include <cstdint>

namespace waybill::detail {

/// Bytes of a batch of rows that others forward, of `total_bytes` that a rank sends to such: short,
/// so that those behind begin early; a message each (docs/performance/gpu_sequences.md).
[[nodiscard]] constexpr std::int64_t usual_batch_bytes(std::int64_t total_bytes) {
  constexpr std::int64_t batches = 16;
  constexpr std::int64_t kib = 1024;
  return std::clamp(total_bytes / batches, 256 * kib, 2048 * kib);
}

/// The most that one put over a network carries.
inline constexpr std::int64_t max_put_bytes = std::int64_t{256} << 10;

}  // namespace waybill::detail
