#pragma once

#include "call_begin.cuh"
#include "lanes.cuh"
#include "rows_of.cuh"

// How ranks tell each other which of their rows have arrived.

namespace waybill::cuda {

/// Where the source raises what it has sent to this rank.
__device__ inline std::uint64_t* channel_slot(const RowsParams& p, std::int32_t at,
                                              std::int32_t source, std::int32_t channel) {
  return p.channels[at] + std::int64_t{source} * max_channels + channel;
}

__device__ inline std::uint64_t* config_slot(const RowsParams& p, std::int32_t at,
                                             std::int32_t source) {
  const std::int64_t first = std::int64_t{p.shape.world_size} * max_channels;
  return p.channels[at] + first + std::int64_t{p.m.parity} * p.shape.world_size + source;
}

/// Tells all ranks that the tokens of the first `groups` groups of a channel have arrived. One
/// warp; its stores are complete.
__device__ inline void signal_groups(const RowsParams& p, std::int32_t channel, std::uint64_t epoch,
                                     std::int32_t groups) {
  for (std::int32_t k = lane_id(); k < p.shape.world_size; k += 32) {
    const std::int32_t d = (p.shape.rank + k) % p.shape.world_size;
    signal(channel_slot(p, d, p.shape.rank, channel),
           (epoch << channel_epoch_shift) + static_cast<std::uint64_t>(groups));
  }
}

/// How the rows of each rank come; lane i of a warp holds ranks i and i + 32.
struct Sources {
  std::int32_t channels[2];
  std::int32_t group[2];  ///< tokens of a channel that are published together
  std::int32_t tokens[2];
  std::int32_t lands[2];  ///< 1: they are in the receive slot
  bool some_land;
  std::int32_t most_units;  ///< groups of all channels of a rank, at most
};

/// What a warp must know of one rank.
struct Source {
  std::int32_t rank;
  std::int32_t channels;
  std::int32_t group;
  std::int32_t tokens;
  bool lands;
};

/// Waits until all ranks have said how they send, and their tokens are placed. One warp.
template <class Rows>
__device__ inline Sources learn_sources(const Rows& p, CallBegin& begin) {
  const MoeShape& s = p.shape;
  const std::uint64_t epoch = begin.epoch();
  const auto config_of = [&](std::int32_t r) {
    return wait_epoch(p.m.arrive, config_slot(p, s.rank, r), epoch << channel_config_shift,
                      channel_config_shift, s.first_rank + r);
  };
  // Few tokens: it comes before the tokens are placed, and would take a time of its own behind
  // that.
  if (lane_id() < s.world_size && begin.has_begin_words()) (void)config_of(lane_id());
  for (std::int32_t r = lane_id(); r < s.world_size; r += 32) begin.wait_placed(r);
  __syncwarp();  // what one source is told of may be written with another
  Sources sources{};
  std::int32_t units = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t r = half * 32 + lane_id();
    if (r >= s.world_size) continue;
    const std::uint64_t seen = config_of(r);
    const auto channels = static_cast<std::int32_t>(seen >> 8 & 0x7FFF);
    const auto group = static_cast<std::int32_t>(seen & 0xFF);
    const std::int32_t tokens = p.spans_nodes() ? s.max_tokens : __ldcg(p.num_input_tokens + r);
    sources.channels[half] = channels;
    sources.group[half] = group;
    sources.tokens[half] = tokens;
    sources.lands[half] = (seen & channel_lands_bit) != 0 ? 1 : 0;
    const std::int32_t each = (tokens + channels - 1) / channels;
    units = max(units, (each + group - 1) / group * channels);
  }
  sources.most_units = __reduce_max_sync(all_lanes, units);
  sources.some_land = __any_sync(all_lanes, sources.lands[0] + sources.lands[1]) != 0;
  return sources;
}

/// Number `position` of the tokens that a rank sends. On several nodes its own come first, then
/// those of the node before, as they are the first to arrive.
template <class Rows>
__device__ inline std::int32_t token_at(const Rows& p, std::int32_t position) {
  if (!p.spans_nodes()) return position;
  const MoeShape& s = p.shape;
  const std::int32_t each = s.max_tokens / s.num_nodes;
  const std::int32_t turn = position / each;
  const std::int32_t node = (s.first_rank / s.node_ranks + s.num_nodes - turn) % s.num_nodes;
  return node * each + position - turn * each;
}

__device__ inline Source source_of(const Sources& all, std::int32_t rank) {
  const auto of = [&](const std::int32_t(&values)[2]) {
    return __shfl_sync(all_lanes, rank < 32 ? values[0] : values[1], rank % 32);
  };
  return {rank, of(all.channels), of(all.group), of(all.tokens), of(all.lands) != 0};
}

}  // namespace waybill::cuda
