#pragma once

#include "params.h"

// What callers give in one of two widths: ids and positions, weights.

namespace waybill::cuda {

__device__ inline std::int64_t index_at(const void* indices, bool wide, std::int64_t i) {
  return wide ? static_cast<const std::int64_t*>(indices)[i]
              : static_cast<const std::int32_t*>(indices)[i];
}

/// What other ranks are sent about topk slot i of this one: the expert, num_experts when dropped,
/// -1 where there is no token. @param bad becomes true for an id that is neither an expert nor the
/// dropped one
__device__ inline std::int32_t id_to_send(const MoeShape& s, const void* ids, bool wide,
                                          std::int32_t dropped_id, std::int64_t i, bool& bad) {
  if (i >= std::int64_t{s.num_tokens} * s.topk) return -1;
  const std::int64_t id = index_at(ids, wide, i);
  const bool in_range = 0 <= id && id < s.num_experts;
  bad |= !in_range && id != dropped_id;
  return in_range ? static_cast<std::int32_t>(id) : s.num_experts;
}

/// The bits of a weight of 4 or 2 bytes, which another rank may have stored while the kernel runs.
__device__ inline std::uint32_t load_weight(const std::byte* weights, std::int64_t i, int bytes) {
  return bytes == 4 ? __ldcg(reinterpret_cast<const std::uint32_t*>(weights) + i)
                    : __ldcg(reinterpret_cast<const std::uint16_t*>(weights) + i);
}

__device__ inline void store_weight(std::byte* weights, std::int64_t i, int bytes,
                                    std::uint32_t bits) {
  if (bytes == 4) {
    reinterpret_cast<std::uint32_t*>(weights)[i] = bits;
  } else {
    reinterpret_cast<std::uint16_t*>(weights)[i] = static_cast<std::uint16_t>(bits);
  }
}

__device__ inline void copy_weight(std::byte* to, const std::byte* from, std::int64_t to_idx,
                                   std::int64_t from_idx, int bytes) {
  store_weight(to, to_idx, bytes, load_weight(from, from_idx, bytes));
}

}  // namespace waybill::cuda
