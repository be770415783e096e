#pragma once

#include <cstdint>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/routing/metadata.h"

namespace waybill::bench {

/// Word `idx` (4 bfloat16 numbers, each of 0.5..1 in size) of the tensor `tensor` on `rank`: known
/// without being kept.
[[nodiscard]] inline std::uint64_t word_of(std::int32_t rank, std::size_t tensor,
                                           std::uint64_t idx) {
  std::uint64_t x = idx + (static_cast<std::uint64_t>(rank) << 48) +
                    (static_cast<std::uint64_t>(tensor) << 40) + 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;  // splitmix64
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  x ^= x >> 31;
  return (x & 0x807F'807F'807F'807F) | 0x3F00'3F00'3F00'3F00;
}

/// Fills device memory with the words of a tensor.
void fill_rows(const TensorView& view, std::int32_t rank, std::size_t tensor);

/// Compares the first, middle and last row of every line that came to `rank`.
/// @throws InternalError naming the first row that is wrong
void check_rows(const TensorView& output, const SparseMetadata& metadata, std::int32_t rank,
                std::size_t tensor);

/// The same of the sums of the rows that `rank` owns, whose addends are `tensor` on the ranks.
void check_sums(const TensorView& output, const SparseMetadata& metadata, std::int32_t rank,
                std::size_t tensor);

}  // namespace waybill::bench
