#pragma once

#include "../device/bulk.cuh"
#include "../device/peers.cuh"
#include "../device/word_copy.cuh"
#include "call.cuh"
#include "kernels.h"

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

// Rings: pieces of rows pass from one place to several.

inline constexpr int max_ring_stages = 6;

/// A stage begins with each lane's destination, negative if there is none. The piece of a row in
/// flight follows.
inline constexpr int ring_address_bytes = 32 * static_cast<int>(sizeof(std::int64_t));

/// Where a row is read.
struct RingSource {
  const std::byte* row;     ///< the whole row
  const std::byte* scales;  ///< null without scales
};

/// A ring of bulk copies: pieces of rows pass through shared memory to up to 32 destinations each.
/// One warp; each lane stores to its own destination and waits for its own stores.
class TmaRing {
 public:
  static constexpr bool copies = true;

  /// If senders load early, the first store waits for the begin of the call.
  /// @param memory shared memory of this warp: stages of cuts.stage_bytes each
  /// @param barriers shared memory of this warp: [stages]
  template <class Rows>
  __device__ TmaRing(const Rows& p, CallBegin& begin, std::byte* memory, std::uint64_t* barriers)
      : p_(p),
        begin_(begin),
        memory_(memory),
        barriers_(barriers),
        lane_(static_cast<int>(threadIdx.x % 32)),
        holds_(Rows::loads),
        to_slots_(Rows::to_slots) {
    if (lane_ == 0) {
      for (int s = 0; s < p.cuts.stages; ++s) barrier_init(&barriers_[s]);
      fence_barrier_init();
    }
    fence_async_global();
    __syncwarp();
  }

  /// Must be called between a wait for rows and the push that reads them.
  __device__ void expect_arrived() const { fence_async_global(); }

  /// Later pushes go to windows. @pre all earlier pushes have arrived
  __device__ void leave_receive_slots() { to_slots_ = false; }

  __device__ void push(const RingSource& from, std::int32_t piece, std::int64_t address) {
    const RowCuts& c = p_.cuts;
    if (in_flight_ == c.stages - 1) finish_oldest();
    bulk_wait_read_but_one();  // the next stage to fill has been read
    __syncwarp();
    std::byte* const stage = memory_ + newest_ * c.stage_bytes;
    reinterpret_cast<std::int64_t*>(stage)[lane_] =
        address < 0 ? -1 : address | std::int64_t{piece} << 49;
    if (lane_ == 0) {
      const std::uint32_t bytes = bytes_of(piece);
      const bool scales = from.scales != nullptr && piece == 0;
      const auto scale_bytes = static_cast<std::uint32_t>(scales ? c.scale_bytes : 0);
      barrier_expect(&barriers_[newest_], bytes + scale_bytes);
      bulk_load_to_copy(stage + ring_address_bytes, from.row + std::int64_t{piece} * c.piece_bytes,
                        bytes, &barriers_[newest_]);
      if (scales) {
        bulk_load_to_copy(stage + ring_address_bytes + c.piece_bytes, from.scales, scale_bytes,
                          &barriers_[newest_]);
      }
    }
    newest_ = newest_ + 1 == c.stages ? 0 : newest_ + 1;
    ++in_flight_;
  }

  /// Waits for older pushes: all but the last stages + 2 pushes have arrived. @pre there were more
  /// pushes than that
  __device__ void wait_earlier() const {
    bulk_wait_but<3>();
    fence_async_global();
    __syncwarp();
  }

  /// Waits until all pieces have arrived.
  __device__ void wait_all() {
    while (in_flight_ > 0) finish_oldest();
    bulk_wait_all();
    fence_async_global();
    __syncwarp();
  }

 private:
  [[nodiscard]] __device__ std::uint32_t bytes_of(std::int32_t piece) const {
    const std::int64_t left = p_.cuts.row_bytes - std::int64_t{piece} * p_.cuts.piece_bytes;
    return static_cast<std::uint32_t>(left < p_.cuts.piece_bytes ? left : p_.cuts.piece_bytes);
  }

  /// Stores the oldest piece in flight.
  __device__ void finish_oldest() {
    if (holds_) {
      (void)begin_.wait_ended();
      holds_ = false;
    }
    const RowCuts& c = p_.cuts;
    const std::byte* const stage = memory_ + oldest_ * c.stage_bytes;
    const std::int64_t address = reinterpret_cast<const std::int64_t*>(stage)[lane_];
    barrier_wait(&barriers_[oldest_], phases_ >> oldest_ & 1U);
    phases_ ^= 1U << oldest_;
    if (address >= 0) {
      const auto piece = static_cast<std::int32_t>(address >> 49);
      const std::int64_t row = address & 0xFFFFFFFF;
      const auto dst = static_cast<std::int32_t>(address >> address_dst_shift & 0xFFFF);
      std::byte* const window = peer_at(to_slots_ ? p_.receive_slots.rows : p_.windows, dst);
      bulk_store(window + row * c.row_bytes + std::int64_t{piece} * c.piece_bytes,
                 stage + ring_address_bytes, bytes_of(piece));
      if (c.scale_bytes != 0 && piece == 0) {
        bulk_store(window + (to_slots_ ? p_.receive_slots.scales_offset : p_.scales_offset) +
                       row * c.scale_bytes,
                   stage + ring_address_bytes + c.piece_bytes,
                   static_cast<std::uint32_t>(c.scale_bytes));
      }
    }
    bulk_commit();
    __syncwarp();
    oldest_ = oldest_ + 1 == c.stages ? 0 : oldest_ + 1;
    --in_flight_;
  }

  const RowsParams& p_;
  CallBegin& begin_;
  std::byte* const memory_;
  std::uint64_t* const barriers_;
  const int lane_;
  bool holds_;
  bool to_slots_;
  int in_flight_ = 0;
  int oldest_ = 0;
  int newest_ = 0;
  unsigned phases_ = 0;
};

/// Does the same with loads and stores of the lanes, for any address and size.
class VectorRing {
 public:
  static constexpr bool copies = true;

  __device__ VectorRing(const RowsParams& p, CallBegin& /*begin*/, std::byte* /*memory*/,
                        std::uint64_t* /*barriers*/)
      : p_(p) {}

  __device__ void expect_arrived() const {}
  __device__ void leave_receive_slots() const {}  // it never sends to them

  __device__ void push(const RingSource& from, std::int32_t piece, std::int64_t address) {
    if (piece != 0) return;  // a push of piece 0 copies the whole row
    const RowCuts& c = p_.cuts;
    copy_row(from.row, c.row_bytes, 0, address);
    if (from.scales != nullptr) copy_row(from.scales, c.scale_bytes, p_.scales_offset, address);
  }

  __device__ void wait_earlier() const { wait_all(); }

  __device__ void wait_all() const {
    __threadfence_system();
    __syncwarp();
  }

 private:
  __device__ void copy_row(const std::byte* from, std::int64_t bytes, std::int64_t offset,
                           std::int64_t address) const {
    for_word(p_.cuts.word_bytes,
             [&]<class Word>(Word) { copy_words<Word>(from, bytes, offset, address); });
  }

  template <class Word>
  __device__ void copy_words(const std::byte* from, std::int64_t bytes, std::int64_t offset,
                             std::int64_t address) const {
    constexpr int unroll = 4;
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const auto count = static_cast<int>(bytes / static_cast<int>(sizeof(Word)));
    const unsigned stores = __ballot_sync(0xFFFFFFFFU, address >= 0);
    for (int first = lane; first - lane < count; first += 32 * unroll) {
      Word words[unroll];
      load_batch<32>(words, reinterpret_cast<const Word*>(from), first, count);
      for (unsigned left = stores; left != 0; left &= left - 1) {
        const std::int64_t to =
            __shfl_sync(0xFFFFFFFFU, address, __ffs(static_cast<int>(left)) - 1);
        const auto dst = static_cast<std::int32_t>(to >> address_dst_shift & 0xFFFF);
        auto* const at =
            reinterpret_cast<Word*>(peer_at(p_.windows, dst) + offset + (to & 0xFFFFFFFF) * bytes);
        store_batch<32>(at, words, first, count);
      }
    }
  }

  const RowsParams& p_;
};

}  // namespace waybill::cuda
