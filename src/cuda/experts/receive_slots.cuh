#pragma once

#include "channels.cuh"
#include "inputs.cuh"
#include "tma_ring.cuh"

// Few tokens are sent before their places are known: to the receive slot of each rank that they go
// to, from where the receiver copies them when the places have come.

namespace waybill::cuda {

/// The receive slot of token t of this rank on the ranks that its ids name; a lane a topk slot, of
/// which the first of a rank has the place. One warp.
__device__ inline std::int64_t slot_address(const RowsParams& p, std::int32_t t) {
  const MoeShape& s = p.shape;
  std::int32_t dst = -1;
  if (lane_id() < s.topk) {
    const std::int64_t i = std::int64_t{t} * s.topk + lane_id();
    const std::int64_t id = index_at(p.receive_slots.ids, p.receive_slots.wide_ids, i);
    if (0 <= id && id < s.num_experts) dst = static_cast<std::int32_t>(id) / s.experts_per_rank;
  }
  const unsigned same = lanes_with(dst, bits_of(s.world_size)) & __ballot_sync(all_lanes, dst >= 0);
  if (dst < 0 || !is_first(same)) return -1;
  return (std::int64_t{dst} << address_dst_shift) + s.rank * p.receive_slots.tokens + t +
         primary_row_bit;
}

/// A token that has landed on this rank.
__device__ inline RingSource row_in_slot(const RowsParams& p, std::int32_t source, std::int32_t t) {
  const std::byte* const rows = p.receive_slots.own_rows;
  const std::int64_t row = std::int64_t{source} * p.receive_slots.tokens + t;
  return {rows + row * p.cuts.row_bytes,
          p.cuts.scale_bytes == 0
              ? nullptr
              : rows + p.receive_slots.scales_offset + row * p.cuts.scale_bytes};
}

}  // namespace waybill::cuda
