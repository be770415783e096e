#pragma once

#include "inputs.cuh"
#include "row_pump.cuh"
#include "streams.cuh"

// Few tokens are sent before their places are known: to the landing of each rank that they go to,
// from where the receiver copies them when the places have come.

namespace waybill::cuda {

/// Where token t of this rank lands on the ranks that its ids name; a lane a choice, of which the
/// first of a rank has the place. One warp.
__device__ inline std::int64_t landing_place(const RowsParams& p, std::int32_t t) {
  const MoeShape& s = p.shape;
  std::int32_t dst = -1;
  if (lane_id() < s.topk) {
    const std::int64_t i = std::int64_t{t} * s.topk + lane_id();
    const std::int64_t id = index_at(p.landing.ids, p.landing.wide_ids, i);
    if (0 <= id && id < s.num_experts) dst = static_cast<std::int32_t>(id) / s.experts_per_rank;
  }
  const unsigned same = lanes_with(dst, bits_of(s.world_size)) & __ballot_sync(all_lanes, dst >= 0);
  if (dst < 0 || !is_first(same)) return -1;
  return (std::int64_t{dst} << place_dst_shift) + s.rank * p.landing.tokens + t + place_leader_bit;
}

/// A token that has landed on this rank.
__device__ inline PumpSource landed_row(const RowsParams& p, std::int32_t source, std::int32_t t) {
  const std::byte* const rows = p.landing.rows[p.shape.rank];
  const std::int64_t row = std::int64_t{source} * p.landing.tokens + t;
  return {rows + row * p.cuts.row_bytes,
          p.cuts.scale_bytes == 0 ? nullptr
                                  : rows + p.landing.scales_offset + row * p.cuts.scale_bytes};
}

}  // namespace waybill::cuda
