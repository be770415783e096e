#pragma once

#include "channels.cuh"
#include "input_fault.cuh"

// What window and tables say of the rows of a token that has arrived.

namespace waybill::cuda {

/// The weight of one topk slot, from where its sender left it.
__device__ inline void take_weight(const RowsParams& p, std::int64_t to, std::int64_t from) {
  const std::uint32_t bits = load_weight(p.sent_weights, from, p.weight_bytes);
  store_weight(p.weights, to, p.weight_bytes, bits);
  if (p.kept_weights != nullptr) store_weight(p.kept_weights, to, p.weight_bytes, bits);
}

/// The local expert whose rows, in the grouped order, row `row` is among.
__device__ inline std::int32_t expert_of(const RowsParams& p, std::int32_t row) {
  std::int32_t low = 0;
  std::int32_t high = p.shape.experts_per_rank;  // offsets[low] <= row < offsets[high]
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    if (p.expert_offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// One topk slot of a token that has arrived, or may have none here; a lane each.
struct Arrived {
  std::int32_t source;
  std::int32_t token;
  std::int32_t topk_slot;
  std::int32_t row;          ///< grouped row, or place in the grouped order; -1: not here
  unsigned here;             ///< lanes of this token's topk slots that are here
  std::int32_t primary_row;  ///< the first of their places
};

__device__ inline bool leads(const Arrived& a) { return a.row >= 0 && is_first(a.here); }

template <class Rows>
__device__ inline MoeTag tag_of(const Rows& p, const Arrived& a, std::int32_t primary_row) {
  const MoeShape& s = p.shape;
  if (!p.spans_nodes()) return {a.source, a.token, a.topk_slot, primary_row};
  const std::int32_t tokens = s.max_tokens / s.num_nodes;
  return {a.token / tokens * s.node_ranks + a.source, a.token % tokens, a.topk_slot, primary_row};
}

/// What tables and window say of grouped rows.
template <class Rows>
__device__ inline void note_grouped(const Rows& p, const Arrived& a) {
  const MoeShape& s = p.shape;
  const bool fits = a.row >= 0 && a.row < s.capacity_rows;
  if (fits) {
    const MoeTag tag = tag_of(p, a, a.primary_row);
    p.tags[a.row] = tag;
    if (p.sent_weights != nullptr) {
      take_weight(p, a.row,
                  (std::int64_t{a.source} * s.max_tokens + a.token) * s.topk + a.topk_slot);
    }
    if (p.fills()) {
      p.kept_tags[a.row] = tag;
      if (!p.claims()) {
        p.primary_rows[a.row] = a.primary_row;
      } else if (atomicCAS(p.primary_rows + a.row, -1, a.primary_row) != -1) {
        report_row_twice(p, a.row, tag);
      }
    }
  }
  if (!p.fills()) return;
  const bool primary_row = leads(a);
  for (std::int32_t k = 0; k < s.topk; ++k) {
    const std::int32_t other = __shfl_sync(all_lanes, a.row, (lane_id() - a.topk_slot + k) & 31);
    if (fits) p.topk_slot_rows[std::int64_t{a.row} * s.topk + k] = primary_row ? other : -1;
  }
}

/// What tables and window say of compact rows; `row` is that of the token.
template <class Rows>
__device__ inline void note_compact(const Rows& p, const Arrived& a, std::int32_t row) {
  const MoeShape& s = p.shape;
  if (a.here == 0 || row >= s.capacity_rows) return;
  if (leads(a)) {
    const MoeTag tag = tag_of(p, a, row);
    p.tags[row] = tag;
    if (p.fills()) p.kept_tags[row] = tag;
  }
  const std::int64_t at = std::int64_t{row} * s.topk + a.topk_slot;
  std::int32_t expert = -1;
  if (!p.fills()) {
    expert = p.known_topk[at];
  } else if (a.row >= 0) {
    expert = expert_of(p, a.row);
  }
  p.topk[at] = expert;
  if (p.sent_weights != nullptr) {
    if (a.row >= 0) {
      take_weight(p, at, (std::int64_t{a.source} * s.max_tokens + a.token) * s.topk + a.topk_slot);
    } else {
      store_weight(p.weights, at, p.weight_bytes, 0);
    }
  }
  if (!p.fills()) return;
  p.kept_topk[at] = expert;
  p.compact_to_grouped[at] = a.row;
  if (a.row >= 0) p.grouped_to_compact[a.row] = row;
}

}  // namespace waybill::cuda
