#include <type_traits>

#include "call.cuh"
#include "kernels.h"
#include "rows.cuh"

namespace waybill::cuda {
namespace {

// Receive slots: few tokens are sent before their rows are known, to slots on their destination
// ranks. The receiver copies them to their rows when these are known.

/// The address of token t's receive slot on each rank that its ids name. Each lane has one topk
/// slot; the first one of each rank gets the address. One warp.
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

/// A token of a source in the receive slots of this rank.
__device__ inline RingSource row_in_slot(const RowsParams& p, std::int32_t source, std::int32_t t) {
  const std::byte* const rows = p.receive_slots.own_rows;
  const std::int64_t row = std::int64_t{source} * p.receive_slots.tokens + t;
  return {rows + row * p.cuts.row_bytes,
          p.cuts.scale_bytes == 0
              ? nullptr
              : rows + p.receive_slots.scales_offset + row * p.cuts.scale_bytes};
}

// Several nodes: a rank forwards tokens of other nodes as they arrive.

/// Knows which tokens of a channel have arrived.
class ForwardedTokens {
 public:
  __device__ explicit ForwardedTokens(std::int32_t channels) : channels_(channels) {}

  /// Waits for token t, at `position`. At the same time each lane looks whether one of the
  /// channel's next tokens has arrived. One warp.
  template <class Rows, class Ring>
  __device__ void wait(const Rows& p, const Ring& ring, std::int32_t position, std::int32_t t,
                       std::uint64_t epoch) {
    const std::int32_t idx = (position - first_) / channels_;
    if (first_ >= 0 && idx < 32 && (here_ >> idx & 1U) != 0) return;
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
    if (node == own_node(p.shape)) return true;
    return load_acquire(slot_of_token(p.forwarded, node, t - node * tokens_of_node(p))) >= epoch;
  }

  const std::int32_t channels_;
  std::int32_t first_ = -1;  ///< position of the token that bit 0 of here_ is about
  unsigned here_ = 0;
};

/// The place from which this rank sends a token.
template <class Rows>
__device__ inline RingSource forwarded_source(const Rows& p, std::int32_t t) {
  const bool own = node_of(p, t) == own_node(p.shape);
  const std::byte* const rows = own ? p.own_tokens : p.tokens;
  const std::byte* const scales = own ? p.own_scales : p.scales;
  return {rows + std::int64_t{t} * p.cuts.row_bytes,
          scales == nullptr ? nullptr : scales + std::int64_t{t} * p.cuts.scale_bytes};
}

// The receiver writes its tables and its window for the rows of an arrived token.

/// Copies the weight of one topk slot from where its sender left it.
__device__ inline void take_weight(const RowsParams& p, std::int64_t to, std::int64_t from) {
  const std::uint32_t bits = load_weight(p.sent_weights, from, p.weight_bytes);
  store_weight(p.weights, to, p.weight_bytes, bits);
  if (p.kept_weights != nullptr) store_weight(p.kept_weights, to, p.weight_bytes, bits);
}

/// The local expert that has a row of the grouped order.
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

/// One topk slot of an arrived token, which may have no row here. Each lane has one.
struct Arrived {
  std::int32_t source;
  std::int32_t token;
  std::int32_t topk_slot;
  std::int32_t row;          ///< grouped row, or position in the grouped order; -1: none here
  unsigned here;             ///< lanes of this token's topk slots that have a row here
  std::int32_t primary_row;  ///< the first of these rows
};

__device__ inline bool is_primary(const Arrived& a) { return a.row >= 0 && is_first(a.here); }

template <class Rows>
__device__ inline RowTag tag_of(const Rows& p, const Arrived& a, std::int32_t primary_row) {
  const MoeShape& s = p.shape;
  if (!p.spans_nodes()) return {a.source, a.token, a.topk_slot, primary_row};
  const std::int32_t tokens = s.max_tokens / s.num_nodes;
  return {a.token / tokens * s.node_ranks + a.source, a.token % tokens, a.topk_slot, primary_row};
}

/// Writes tables and window for grouped rows.
template <class Rows>
__device__ inline void note_grouped(const Rows& p, const Arrived& a) {
  const MoeShape& s = p.shape;
  const bool fits = a.row >= 0 && a.row < s.capacity_rows;
  if (fits) {
    const RowTag tag = tag_of(p, a, a.primary_row);
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
  const bool primary_row = is_primary(a);
  for (std::int32_t k = 0; k < s.topk; ++k) {
    const std::int32_t other = __shfl_sync(all_lanes, a.row, (lane_id() - a.topk_slot + k) & 31);
    if (fits) p.topk_slot_rows[std::int64_t{a.row} * s.topk + k] = primary_row ? other : -1;
  }
}

/// Writes tables and window for compact rows.
/// @param row the token's row
template <class Rows>
__device__ inline void note_compact(const Rows& p, const Arrived& a, std::int32_t row) {
  const MoeShape& s = p.shape;
  if (a.here == 0 || row >= s.capacity_rows) return;
  if (is_primary(a)) {
    const RowTag tag = tag_of(p, a, row);
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

constexpr int vector_warps = 16;
constexpr int table_warps = 5;  // in addition to ring_warps

/// Sends tokens channel, channel + channels, ..., each once to every destination rank.
template <class Rows, class Ring>
__device__ void send_channel(const Rows& p, Ring& ring, std::int32_t channel, std::int32_t channels,
                             CallBegin& begin) {
  const MoeShape& s = p.shape;
  const bool to_slots = Rows::to_slots;
  const auto address_of = [&](std::int32_t position) -> std::int64_t {
    if (position >= s.num_tokens) return -1;
    if (to_slots) return slot_address(p, position);
    return lane_id() < s.topk
               ? p.addresses[std::int64_t{token_at(p, position)} * s.topk + lane_id()]
               : -1;
  };
  std::int32_t in_group = 0;
  std::int32_t groups = 0;
  bool skipped = false;  // since the last signal
  ForwardedTokens forwarded(channels);
  std::int64_t next = address_of(channel);
  for (std::int32_t i = channel; i < s.num_tokens; i += channels) {
    const std::int32_t t = token_at(p, i);
    const bool sends = next >= 0 && (next & primary_row_bit) != 0 &&
                       (to_slots || (next & 0xFFFFFFFF) < s.capacity_rows);
    const std::int64_t address = sends ? next & ~primary_row_bit : -1;
    next = address_of(i + channels);
    RingSource from{
        p.tokens + std::int64_t{t} * p.cuts.row_bytes,
        p.scales == nullptr ? nullptr : p.scales + std::int64_t{t} * p.cuts.scale_bytes};
    // With several nodes many tokens have no row here or do not exist.
    if (p.spans_nodes() && __ballot_sync(all_lanes, address >= 0) == 0) {
      skipped = true;
    } else {
      if (p.spans_nodes()) {
        forwarded.wait(p, ring, i, t, begin.wait_ended());
        from = forwarded_source(p, t);
      }
      for (std::int32_t piece = 0; piece < p.cuts.pieces; ++piece) ring.push(from, piece, address);
    }
    if (++in_group < p.cuts.group) continue;
    in_group = 0;
    ++groups;
    if (skipped) {  // wait_earlier() needs more pushes
      ring.wait_all();
      signal_groups(p, channel, begin.epoch(), groups);
      skipped = false;
    } else if (groups > 1) {
      ring.wait_earlier();
      signal_groups(p, channel, begin.epoch(), groups - 1);
    }
  }
  ring.wait_all();
  if (groups + in_group == 0) return;
  signal_groups(p, channel, begin.epoch(), groups + (in_group > 0 ? 1 : 0));
}

/// Copies the round's tokens to the rows that do not have them yet: from a receive slot to all
/// rows, or from a token's first row to its other rows.
/// @param row the token's row, if rows are compact
template <class Rows, class Ring>
__device__ void copy_rows(const Rows& p, Ring& ring, const Arrived& a, bool in_slots,
                          std::int32_t row) {
  const MoeShape& s = p.shape;
  const bool compact = s.compact != 0;
  const std::int64_t address = compact ? row : a.row;
  bool copies = a.row >= 0 && address < s.capacity_rows;
  if (compact) {
    copies = copies && in_slots && is_primary(a);
  } else if (!in_slots) {
    copies = copies && !is_primary(a) && a.primary_row < s.capacity_rows;
  }
  const std::int64_t to = (std::int64_t{s.rank} << address_dst_shift) + address;
  const std::byte* const window = p.own_window;
  unsigned left = __ballot_sync(all_lanes, copies);
  while (left != 0) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t primary_row = __shfl_sync(all_lanes, a.primary_row, lane);
    const std::int32_t token = __shfl_sync(all_lanes, a.token, lane);
    const unsigned of_token = __shfl_sync(all_lanes, a.here, lane);
    const RingSource first{window + primary_row * p.cuts.row_bytes,
                           p.cuts.scale_bytes == 0
                               ? nullptr
                               : window + p.scales_offset + primary_row * p.cuts.scale_bytes};
    const RingSource from = in_slots ? row_in_slot(p, a.source, token) : first;
    const bool mine = copies && (of_token >> lane_id() & 1U) != 0;
    for (std::int32_t piece = 0; piece < p.cuts.pieces; ++piece) {
      ring.push(from, piece, mine ? to : -1);
    }
    left &= ~of_token;
  }
}

/// Takes some tokens of a group. Each lane has one topk slot.
template <class Rows, class Ring>
__device__ void take_round(const Rows& p, Ring& ring, const Source& source, std::int32_t token,
                           bool active) {
  const MoeShape& s = p.shape;
  const std::int32_t k = lane_id() % s.topk;
  const std::int64_t at = (std::int64_t{source.rank} * s.max_tokens + token) * record_stride(s);
  Arrived a{source.rank, token, k, -1, 0, -1};
  std::int32_t row = -1;
  if (active) {
    a.row = __ldcg(p.records + at + k);
    if (s.compact != 0) row = __ldcg(p.records + at + s.topk);
    if (p.fills() && p.kept_records != nullptr) {
      p.kept_records[at + k] = a.row;
      if (s.compact != 0 && k == 0) p.kept_records[at + s.topk] = row;
    }
  }
  a.here = __ballot_sync(all_lanes, a.row >= 0) & lanes_of_token(s.topk, k);
  const int first = a.here == 0 ? lane_id() : __ffs(static_cast<int>(a.here)) - 1;
  a.primary_row = __shfl_sync(all_lanes, a.row, first);
  if constexpr (Ring::copies) copy_rows(p, ring, a, source.in_slots, row);
  if (s.compact == 0) {
    note_grouped(p, a);
  } else if (active) {
    note_compact(p, a, row);
  }
}

/// Waits for a group of a channel of `source`, and takes it.
template <class Rows, class Ring>
__device__ void take_unit(const Rows& p, Ring& ring, const Source& source, std::int32_t unit,
                          std::uint64_t epoch) {
  const std::int32_t channel = unit % source.channels;
  const std::int32_t g = unit / source.channels;
  const std::int32_t begin = channel + g * source.group * source.channels;
  if (begin >= source.tokens) return;
  const std::uint64_t wanted = (epoch << channel_epoch_shift) + static_cast<std::uint64_t>(g) + 1;
  (void)wait_epoch(p.m.arrive, channel_slot(p.own_channels, source.rank, channel), wanted,
                   channel_epoch_shift, p.shape.first_rank + source.rank);
  __syncwarp();
  ring.expect_arrived();
  const std::int32_t together = 32 / p.shape.topk;
  const std::int32_t mine = lane_id() / p.shape.topk;
  for (std::int32_t i = 0; i < source.group && begin + i * source.channels < source.tokens;
       i += together) {
    const std::int32_t position = begin + (i + mine) * source.channels;
    const bool active = mine < together && i + mine < source.group && position < source.tokens;
    take_round(p, ring, source, token_at(p, position), active);
  }
}

template <class Word>
__device__ void clear_words(std::byte* at, std::int64_t bytes) {
  for (std::int64_t i = lane_id(); i < bytes / static_cast<int>(sizeof(Word)); i += 32) {
    reinterpret_cast<Word*>(at)[i] = Word{};
  }
}

__device__ void clear_bytes(std::byte* at, std::int64_t bytes, int word_bytes) {
  if (word_bytes == 16) {
    clear_words<uint4>(at, bytes);
  } else {
    clear_words<std::uint8_t>(at, bytes);
  }
}

/// Clears the padding rows after each expert's rows. They come from no token. Each warp clears
/// some.
template <class Rows>
__device__ void clear_padding(const Rows& p, int warps) {
  const MoeShape& s = p.shape;
  if (s.alignment == 1) return;
  const auto warp =
      static_cast<std::int32_t>(blockIdx.x) * warps + static_cast<std::int32_t>(threadIdx.x / 32);
  const std::int32_t step = static_cast<std::int32_t>(gridDim.x) * warps;
  for (std::int32_t i = warp; i < s.experts_per_rank * s.alignment; i += step) {
    const std::int32_t e = i / s.alignment;
    const std::int32_t row = p.expert_offsets[e] + p.expert_counts[e] + i % s.alignment;
    if (row >= p.expert_offsets[e + 1]) continue;
    if (s.compact != 0) {
      if (p.fills() && lane_id() == 0) p.grouped_to_compact[row] = -1;
      continue;
    }
    if (row >= s.capacity_rows) continue;
    std::byte* const window = p.own_window;
    clear_bytes(window + std::int64_t{row} * p.cuts.row_bytes, p.cuts.row_bytes, p.cuts.word_bytes);
    clear_bytes(window + p.scales_offset + std::int64_t{row} * p.cuts.scale_bytes,
                p.cuts.scale_bytes, 1);
    if (p.sent_weights != nullptr) {
      clear_bytes(p.weights + std::int64_t{row} * p.weight_bytes, p.weight_bytes, 1);
    }
    if (lane_id() == 0) p.tags[row] = {-1, -1, -1, -1};
    if (!p.fills()) continue;
    if (lane_id() == 0) {
      p.kept_tags[row] = {-1, -1, -1, -1};
      p.primary_rows[row] = -1;
    }
    if (lane_id() < s.topk) p.topk_slot_rows[std::int64_t{row} * s.topk + lane_id()] = -1;
  }
}

/// Takes groups of arrived rows. Any warp takes the next group, so senders help when they are done.
/// In low-latency calls each warp has a first group of its own, spread over the blocks and
/// beginning with the warps that send last; otherwise a few blocks would take all groups.
template <class Rows, class Ring>
__device__ void receive(const Rows& p, Ring& ring, CallBegin& begin) {
  const auto world = static_cast<std::uint32_t>(p.shape.world_size);
  const bool spreads = Rows::to_slots;
  // groups that belong to warps, see above
  const std::uint32_t given = spreads ? gridDim.x * ring_warps : 0;
  const auto claim = [&] {
    std::uint32_t unit = 0;
    if (lane_id() == 0) unit = given + atomicAdd(&p.m.state->next_unit, 1U);
    return unit;
  };
  const std::uint64_t epoch = begin.epoch();
  std::uint32_t unit = 0;
  if (Ring::copies && spreads) {
    unit = (ring_warps - 1 - threadIdx.x / 32) * gridDim.x + blockIdx.x;
  } else if (Ring::copies) {
    unit = claim();  // the atomic runs during the waits below
  }
  const Sources sources = learn_sources(p, begin);
  if constexpr (!Ring::copies) {
    if (sources.some_in_slots) return;
    unit = claim();
  }
  const std::uint32_t total = static_cast<std::uint32_t>(sources.max_units) * world;
  unit = __shfl_sync(all_lanes, unit, 0);
  while (unit < total) {
    const std::uint32_t next = claim();
    const auto rank =
        static_cast<std::int32_t>((unit + static_cast<std::uint32_t>(p.shape.rank)) % world);
    take_unit(p, ring, source_of(p, sources, rank), static_cast<std::int32_t>(unit / world), epoch);
    unit = __shfl_sync(all_lanes, next, 0);
  }
  ring.wait_all();
}

/// Stands for the ring in warps that only fill tables.
struct NoRing {
  static constexpr bool copies = false;
  __device__ void expect_arrived() const {}
  __device__ void wait_all() const {}
};

/// Reports windows that were too small. All ranks report the same.
__device__ void report_overflow(const RowsParams& p, std::uint64_t epoch) {
  const std::int32_t rows = __ldcg(p.max_recv_rows);
  if (rows <= p.shape.capacity_rows || rows <= static_cast<std::int32_t>(*p.overflow)) return;
  *p.overflow = epoch << overflow_epoch_shift | static_cast<std::uint32_t>(rows);
}

/// Moves rows. A block has `MoverWarps` warps that send and copy rows. `TableWarps` more warps fill
/// the tables of compact rows meanwhile, as these are not copied.
template <EarlyWork early_work, class Ring, int MoverWarps, int TableWarps>
__global__ void __launch_bounds__((MoverWarps + TableWarps) * 32, 1)
    rows_kernel(const __grid_constant__ RowsOf<early_work> p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[MoverWarps][max_ring_stages];
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  CallBegin begin(p);  // begun by an earlier kernel
  linger_block(p.m);
  const std::int32_t max_sending = min(p.num_senders * MoverWarps, max_channels);
  const std::int32_t channels = max(1, min(max_sending, p.shape.num_tokens));
  // Senders with early work must not wait here. They use bulk copies, and then the last warp of a
  // block only fills tables.
  if (early_work == EarlyWork::nothing) (void)begin.wait_ended();
  if (block == 0 && warp == MoverWarps + TableWarps - 1) {
    send_configs(p, channels, begin.epoch());
  }
  if (warp < MoverWarps) {
    Ring ring(p, begin, shared + warp * p.cuts.stages * p.cuts.stage_bytes, barriers[warp]);
    // Neighbouring tokens go to different blocks.
    const std::int32_t channel = warp * p.num_senders + block;
    if (block < p.num_senders && channel < channels)
      send_channel(p, ring, channel, channels, begin);
    ring.leave_receive_slots();
    receive(p, ring, begin);
  } else if (p.shape.compact != 0) {
    NoRing ring;
    receive(p, ring, begin);
  }
  const std::uint64_t epoch = begin.wait_ended();
  if (p.compares() && block == static_cast<std::int32_t>(gridDim.x) - 1 &&
      warp == MoverWarps + TableWarps - 1) {
    CallComparison(p.m.arrive, epoch, true).settle(p.m.arrive);
  }
  clear_padding(p, MoverWarps + TableWarps);
  if (is_last_block(p.m.state)) {
    report_overflow(p, epoch);
    p.m.state->call.blocks = 0;
    p.m.state->next_unit = 0;
    p.m.state->begun = 0;
  }
}

template <EarlyWork early_work>
constexpr auto bulk_kernel = rows_kernel<early_work, TmaRing, ring_warps, table_warps>;
constexpr auto vector_kernel = rows_kernel<EarlyWork::nothing, VectorRing, vector_warps, 0>;

/// Calls with the value as a constant.
template <class Call>
cudaError_t for_early_work(EarlyWork early_work, Call&& call) {
  switch (early_work) {
    case EarlyWork::loads:
      return call(std::integral_constant<EarlyWork, EarlyWork::loads>{});
    case EarlyWork::to_slots:
      return call(std::integral_constant<EarlyWork, EarlyWork::to_slots>{});
    default:
      return call(std::integral_constant<EarlyWork, EarlyWork::nothing>{});
  }
}

constexpr int max_shared_bytes = 227 * 1024 - 6 * 1024;

}  // namespace

RowCuts cut_rows(std::int64_t row_bytes, std::int32_t scale_bytes, bool bulk, int word_bytes) {
  constexpr int room = max_shared_bytes / ring_warps;
  constexpr std::int64_t max_piece = 14336;
  RowCuts cuts{};
  cuts.row_bytes = row_bytes;
  cuts.scale_bytes = scale_bytes;
  cuts.word_bytes = word_bytes;
  cuts.pieces = 1;
  cuts.piece_bytes = static_cast<std::int32_t>(row_bytes);
  cuts.stages = 2;
  cuts.group = 4;
  if (!bulk) return cuts;
  const std::int64_t fits = std::int64_t{room} / 2 - 256 - scale_bytes - 128;
  const std::int64_t piece = fits < max_piece ? fits / 128 * 128 : max_piece;
  cuts.pieces = static_cast<std::int32_t>((row_bytes + piece - 1) / piece);
  cuts.piece_bytes =
      static_cast<std::int32_t>((row_bytes + cuts.pieces - 1) / cuts.pieces + 15) / 16 * 16;
  cuts.stage_bytes = static_cast<std::int32_t>(
      (ring_address_bytes + cuts.piece_bytes + scale_bytes + 127) / 128 * 128);
  const int stages = room / cuts.stage_bytes;
  cuts.stages = stages < max_ring_stages ? stages : max_ring_stages;
  const int pushes = cuts.stages - 1 + 3;  // see TmaRing::wait_earlier
  const int tokens = (pushes + cuts.pieces - 1) / cuts.pieces;
  if (tokens > cuts.group) cuts.group = tokens;
  return cuts;
}

cudaError_t prepare_rows(bool bulk) {
  if (!bulk) return load_kernels(vector_kernel);
  for (const EarlyWork early_work : {EarlyWork::nothing, EarlyWork::loads, EarlyWork::to_slots}) {
    const cudaError_t status = for_early_work(early_work, [](auto constant) {
      return cudaFuncSetAttribute(bulk_kernel<constant()>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared_bytes);
    });
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_rows(const RowsParams& params, bool bulk, bool early, int blocks,
                        cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(blocks);
  if (!bulk) {
    return launch_kernel(vector_kernel, grid, vector_warps * 32, 0, false, stream,
                         RowsOf<EarlyWork::nothing>{params});
  }
  const auto shared =
      static_cast<std::size_t>(ring_warps * params.cuts.stages * params.cuts.stage_bytes);
  return for_early_work(params.early_work, [&](auto work) {
    return launch_kernel(bulk_kernel<work()>, grid, (ring_warps + table_warps) * 32, shared, early,
                         stream, RowsOf<work()>{params});
  });
}

}  // namespace waybill::cuda
