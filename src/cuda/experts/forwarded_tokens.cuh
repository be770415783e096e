#pragma once

#include "channels.cuh"
#include "chunk_slots.cuh"
#include "tma_ring.cuh"

// Several nodes: tokens that a rank sends for others, as they come.

namespace waybill::cuda {

/// Which tokens of a channel are here.
class ForwardedTokens {
 public:
  __device__ explicit ForwardedTokens(std::int32_t channels) : channels_(channels) {}

  /// Waits for token t, at `position`. It asks for the channel's next ones in the same time: a lane
  /// each. One warp.
  template <class Rows, class Ring>
  __device__ void wait(const Rows& p, const Ring& ring, std::int32_t position, std::int32_t t,
                       std::uint64_t epoch) {
    const std::int32_t ahead = (position - first_) / channels_;
    if (first_ >= 0 && ahead < 32 && (here_ >> ahead & 1U) != 0) return;
    first_ = position;
    const std::int32_t mine = position + lane_id() * channels_;
    here_ = __ballot_sync(all_lanes, mine < p.shape.num_tokens && is_here(p, mine, epoch));
    const std::int32_t node = node_of(p, t);
    if ((here_ & 1U) == 0 && lane_id() == 0) {
      wait_slot(p.m.arrive, slot_of_token(p.forwarded, node, t - node * tokens_of_node(p)), epoch,
                node * p.shape.node_ranks + p.shape.rank);
    }
    here_ |= 1U;
    __syncwarp();
    ring.expect_arrived();
  }

 private:
  template <class Rows>
  static __device__ bool is_here(const Rows& p, std::int32_t position, std::uint64_t epoch) {
    const std::int32_t t = token_at(p, position);
    const std::int32_t node = node_of(p, t);
    if (node == own_node(p)) return true;
    return load_acquire(slot_of_token(p.forwarded, node, t - node * tokens_of_node(p))) >= epoch;
  }

  const std::int32_t channels_;
  std::int32_t first_ = -1;  ///< position of what bit 0 is about
  unsigned here_ = 0;
};

/// Where a token lies.
template <class Rows>
__device__ inline RingSource forwarded_source(const Rows& p, std::int32_t t) {
  const bool own = node_of(p, t) == own_node(p);
  const std::byte* const rows = own ? p.own_tokens : p.tokens;
  const std::byte* const scales = own ? p.own_scales : p.scales;
  return {rows + std::int64_t{t} * p.cuts.row_bytes,
          scales == nullptr ? nullptr : scales + std::int64_t{t} * p.cuts.scale_bytes};
}

}  // namespace waybill::cuda
