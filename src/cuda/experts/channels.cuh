#pragma once

#include "../device/peers.cuh"
#include "call.cuh"
#include "params.h"

namespace waybill::cuda {

/// Parameters of a kernel that moves rows, together with what is known of the call at compile time.
/// With few tokens each instruction runs once, and the code of other kinds of calls would have to
/// be fetched, too. A sender with early work is alone on its device and on one node
/// (GpuExpertExecutor::early_work_of).
template <EarlyWork known>
struct RowsOf : RowsParams {
  static constexpr bool waits = known == EarlyWork::nothing;
  static constexpr bool loads = known == EarlyWork::loads;
  static constexpr bool to_slots = known == EarlyWork::to_slots;

  [[nodiscard]] __device__ bool spans_nodes() const { return waits && shape.num_nodes > 1; }
  [[nodiscard]] __device__ bool fills() const { return to_slots || (waits && fills_tables); }
  /// Whether this kernel compares call words: the ranks have synchronized, the routing is an
  /// earlier one, and there is one node.
  [[nodiscard]] __device__ bool compares() const {
    return loads || (waits && !fills_tables && shape.num_nodes == 1);
  }
  [[nodiscard]] __device__ bool claims() const { return waits && claims_rows; }
};

// Channels: ranks signal each other which of their rows have arrived.

/// The counter of a source's channel, in the memory of a receiver.
__device__ inline std::uint64_t* channel_slot(std::uint64_t* channels, std::int32_t source,
                                              std::int32_t channel) {
  return channels + std::int64_t{source} * max_channels + channel;
}

__device__ inline std::uint64_t* config_slot(const RowsParams& p, std::uint64_t* channels,
                                             std::int32_t source) {
  const std::int64_t first = std::int64_t{p.shape.world_size} * max_channels;
  return channels + first + std::int64_t{p.m.parity} * p.shape.world_size + source;
}

/// Visits the channels of all ranks of the node, from this rank on. One warp.
template <class Visit>
__device__ inline void for_channels(const RowsParams& p, Visit&& visit) {
#pragma unroll 1  // each lane has one rank if ranks are few
  for (std::int32_t k = lane_id(); k < p.shape.world_size; k += 32) {
    visit(peer_at(p.channels, rank_after(p.shape, k)));
  }
}

/// Signals all ranks that the first `groups` groups of a channel have arrived. One warp, whose
/// stores are complete.
__device__ inline void signal_groups(const RowsParams& p, std::int32_t channel, std::uint64_t epoch,
                                     std::int32_t groups) {
  for_channels(p, [&](std::uint64_t* channels) {
    signal(channel_slot(channels, p.shape.rank, channel),
           (epoch << channel_epoch_shift) + static_cast<std::uint64_t>(groups));
  });
}

/// Signals all ranks how this one sends. One warp.
template <class Rows>
__device__ inline void send_configs(const Rows& p, std::int32_t num_channels, std::uint64_t epoch) {
  for_channels(p, [&](std::uint64_t* channels) {
    signal(config_slot(p, channels, p.shape.rank),
           channel_config(epoch, num_channels, p.cuts.group, Rows::to_slots));
  });
}

/// How the rows of one rank arrive.
struct Source {
  std::int32_t rank;
  std::int32_t channels;
  std::int32_t group;  ///< tokens of a channel that are signalled together
  std::int32_t tokens;
  bool in_slots;  ///< the tokens are in receive slots

  /// Number of groups in all channels.
  [[nodiscard]] __device__ std::int32_t units() const {
    const std::int32_t each = (tokens + channels - 1) / channels;
    return (each + group - 1) / group * channels;
  }
};

/// Reads how the rows of rank r arrive. @pre its tokens are placed
/// @param config the word of send_configs()
template <class Rows>
__device__ inline Source source_from(const Rows& p, std::int32_t r, std::uint64_t config) {
  return {r, static_cast<std::int32_t>(config >> 8 & 0x7FFF),
          static_cast<std::int32_t>(config & 0xFF),
          p.spans_nodes() ? p.shape.max_tokens : __ldcg(p.num_input_tokens + r),
          (config & channel_in_slots_bit) != 0};
}

/// Ranks of the node whose `Source` a warp keeps in registers: lane i has ranks i and i + 32. Those
/// of further ranks are read again when they are needed.
inline constexpr std::int32_t kept_sources = 64;

/// How the rows of each rank arrive.
struct Sources {
  std::int32_t channels[2];
  std::int32_t group[2];
  std::int32_t tokens[2];
  std::int32_t in_slots[2];
  bool some_in_slots;
  std::int32_t max_units;  ///< the number of groups of the rank that has most
};

/// Waits for the config of rank r.
__device__ inline std::uint64_t wait_config(const RowsParams& p, std::uint64_t epoch,
                                            std::int32_t r) {
  return wait_epoch(p.m.arrive, config_slot(p, p.own_channels, r), epoch << channel_config_shift,
                    channel_config_shift, p.shape.first_rank + r);
}

/// Does learn_sources() for ranks that a warp does not keep. It is not inlined, as few worlds have
/// such ranks.
/// @return twice the largest number of groups of such a rank, plus 1 if one of them uses receive
///   slots
template <class Rows>
__device__ __noinline__ std::int32_t learn_far_sources(const Rows& p, std::uint64_t epoch) {
  std::int32_t units = 0;
  std::int32_t in_slots = 0;
  for (std::int32_t r = kept_sources + lane_id(); r < p.shape.world_size; r += 32) {
    const Source source = source_from(p, r, wait_config(p, epoch, r));
    units = max(units, source.units());
    in_slots |= source.in_slots ? 1 : 0;
  }
  return 2 * units + in_slots;
}

/// Waits until all ranks have announced how they send, and their tokens are placed. One warp.
template <class Rows>
__device__ inline Sources learn_sources(const Rows& p, CallBegin& begin) {
  const MoeShape& s = p.shape;
  const std::uint64_t epoch = begin.epoch();
  // In low-latency calls the configs arrive before the tokens are placed. Waiting for them later
  // would cost extra time.
  if (lane_id() < s.world_size && begin.has_begin_words()) (void)wait_config(p, epoch, lane_id());
  for (std::int32_t r = lane_id(); r < s.world_size; r += 32) begin.wait_placed(r);
  __syncwarp();  // later loads depend on waits of other lanes
  Sources sources{};
  std::int32_t units = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t r = half * 32 + lane_id();
    if (r >= s.world_size) continue;
    const Source source = source_from(p, r, wait_config(p, epoch, r));
    sources.channels[half] = source.channels;
    sources.group[half] = source.group;
    sources.tokens[half] = source.tokens;
    sources.in_slots[half] = source.in_slots ? 1 : 0;
    units = max(units, source.units());
  }
  const std::int32_t far = s.world_size > kept_sources ? learn_far_sources(p, epoch) : 0;
  sources.max_units = __reduce_max_sync(all_lanes, max(units, far / 2));
  sources.some_in_slots =
      __any_sync(all_lanes, sources.in_slots[0] + sources.in_slots[1] + far % 2) != 0;
  return sources;
}

/// Several nodes: tokens per node in the common order, and the node of a token.
template <class Rows>
__device__ inline std::int32_t tokens_of_node(const Rows& p) {
  return p.shape.max_tokens / p.shape.num_nodes;
}
template <class Rows>
__device__ inline std::int32_t node_of(const Rows& p, std::int32_t token) {
  return token / tokens_of_node(p);
}

/// The token at `position` in the order of sending. On several nodes, own tokens come first, then
/// those of the node before, and so on, because they arrive in this order.
template <class Rows>
__device__ inline std::int32_t token_at(const Rows& p, std::int32_t position) {
  if (!p.spans_nodes()) return position;
  const MoeShape& s = p.shape;
  const std::int32_t each = tokens_of_node(p);
  const std::int32_t node_idx = position / each;
  const std::int32_t node = (own_node(p.shape) + s.num_nodes - node_idx) % s.num_nodes;
  return node * each + position - node_idx * each;
}

/// How the rows of a rank arrive. All lanes ask for the same rank.
template <class Rows>
__device__ inline Source source_of(const Rows& p, const Sources& all, std::int32_t rank) {
  if (rank >= kept_sources) {
    return source_from(p, rank, load_acquire(config_slot(p, p.own_channels, rank)));
  }
  const auto of = [&](const std::int32_t(&values)[2]) {
    return __shfl_sync(all_lanes, rank < 32 ? values[0] : values[1], rank % 32);
  };
  return {rank, of(all.channels), of(all.group), of(all.tokens), of(all.in_slots) != 0};
}

}  // namespace waybill::cuda
