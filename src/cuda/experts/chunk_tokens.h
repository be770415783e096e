#pragma once

#include <cstdint>

#include "schedule/network_program.h"

namespace waybill::cuda {

/// What goes to another node is signalled chunk by chunk: 1 << shift tokens each, at most 32, of at
/// most 128 KiB where one has no more; of few tokens fewer, so that all blocks of a network
/// path have some.
[[nodiscard]] constexpr std::int32_t chunk_shift(std::int64_t row_bytes, std::int64_t max_tokens) {
  constexpr std::int32_t most = 5;
  constexpr std::int64_t most_bytes = max_put_bytes / 2;
  constexpr std::int64_t chunks_of_few = 32;
  std::int32_t shift = 0;
  while (shift < most && (row_bytes << (shift + 1)) <= most_bytes &&
         (chunks_of_few << (shift + 1)) <= max_tokens) {
    ++shift;
  }
  return shift;
}

[[nodiscard]] constexpr std::int64_t num_chunks(std::int64_t max_tokens, std::int32_t shift) {
  return (max_tokens + (std::int64_t{1} << shift) - 1) >> shift;
}

}  // namespace waybill::cuda
