#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../device/arrive_params.h"
#include "../device/fault.h"
#include "../device/peers.h"
#include "experts/row_tag.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {
inline constexpr int max_channels = 1024;           ///< warps of a rank that send rows
inline constexpr int ring_warps = 7;                ///< of a block, that move rows
inline constexpr int max_low_latency_tokens = 128;  ///< of a rank: what a call does for few tokens

/// Counters of one layer on its rank's device.
struct MoeState {
  CallState call;
  std::uint32_t
      last_parity[2];       ///< 1 + parity of the last dispatch and combine; 0 before the first
  std::uint32_t next_unit;  ///< of the running dispatch: the next piece of arrived rows
  std::uint32_t arrived_blocks;  ///< of the running kernel, that have come to its middle
  std::uint32_t next_sum;        ///< of the running combine: the next unit that is summed
  std::uint64_t begun;           ///< epoch of the dispatch that runs; 0 from its end on
};

/// Few tokens: by source, the epoch of the last call that has placed its tokens, and written what
/// receivers read of it. Behind the state.
inline constexpr std::int64_t moe_state_bytes(std::int32_t world_size) {
  return std::int64_t{sizeof(MoeState)} + world_size * std::int64_t{sizeof(std::uint64_t)};
}
__host__ __device__ inline std::uint64_t* placed_slot(MoeState* state, std::int32_t source) {
  return reinterpret_cast<std::uint64_t*>(state + 1) + source;
}

/// What one rank of a layer is.
struct MoeShape {
  std::int32_t rank;
  std::int32_t world_size;
  std::int32_t num_experts;
  std::int32_t experts_per_rank;
  std::int32_t topk;
  std::int32_t num_tokens;  ///< of this rank in this call
  std::int32_t max_tokens;
  std::int32_t compact;  ///< rows: one a token, not one a topk slot
  std::int32_t alignment;
  std::int32_t num_nodes;
  std::int32_t node_ranks;     ///< ranks of a node
  std::int32_t first_rank;     ///< of this rank's node
  std::int64_t capacity_rows;  ///< rows of a window
};

/// What a rank sends the others before rows can be placed: topk slots of each expert, dropped ones,
/// tokens with a topk slot on each rank.
__host__ __device__ constexpr std::int32_t num_counts(const MoeShape& s) {
  return s.num_experts + 1 + s.world_size;
}

/// The rank that is k behind this one. @pre 0 <= k < world_size
__host__ __device__ constexpr std::int32_t rank_after(const MoeShape& s, std::int32_t k) {
  const std::int32_t r = s.rank + k;
  return r < s.world_size ? r : r - s.world_size;
}

/// This rank's node.
__host__ __device__ constexpr std::int32_t own_node(const MoeShape& s) {
  return s.first_rank / s.node_ranks;
}

/// int32 that the sender of a token sends to each rank of its node: the row of each topk slot
/// there, -1 if it is elsewhere; with compact rows these are places in the grouped order, and the
/// compact row follows.
__host__ __device__ constexpr std::int32_t record_stride(const MoeShape& s) {
  return s.topk + s.compact;
}

// A topk slot's place: row in the lower half, rank in the node above it. Negative: dropped, or on
// another node.
inline constexpr int address_dst_shift = 32;
/// Of the first topk slot of a token on a rank.
inline constexpr std::int64_t primary_row_bit = std::int64_t{1} << 48;
/// Of a row that did not fit.
inline constexpr std::int64_t lost_address =
    (std::int64_t{max_gpu_ranks} << address_dst_shift) + primary_row_bit;

/// What the device writes into pinned host memory when the counts of a dispatch are known, [W]:
/// received rows of each rank, with the ticket of the route above them. Where the host must say
/// what crosses between nodes, behind them rows to and from each node (NodeRowsParams).
using HostCount = volatile std::uint64_t;
inline constexpr int ticket_shift = 32;

/// A count on its way, with the lower half of the call's epoch above it: whoever sees the epoch has
/// the count.
inline constexpr int count_epoch_shift = 32;

/// What the device reports of windows that were too small, in pinned host memory.
struct MoeHostFaults {
  /// Received rows of the rank that should have had the most, where more than fit, with the lower
  /// half of the call's epoch above; 0: all did fit.
  volatile std::uint64_t overflow;
};
inline constexpr int overflow_epoch_shift = 32;

/// A part of a call's parameters: how ranks synchronize.
struct MoeArrive {
  ArriveParams arrive;  ///< slots: `entered`; its state is MoeState::call
  MoeState* state;
  std::uint32_t parity;        ///< parity of this dispatch or combine
  std::uint32_t max_delay_ns;  ///< for tests, see delay.cuh; else 0
};

/// The parities of the next dispatch and of the next combine.
struct MoeParities {
  std::uint32_t of[2];
};

/// Counting, exchange of counts, placing. On several nodes of the tokens of the ranks with this
/// rank's local index, one a node, which are all forwarded by this rank: then [T, K] below is
/// [nodes, M, K], ids are int32, and -1 where there is no token.
struct RouteParams {
  MoeArrive m;
  MoeShape shape;
  const void* ids;  ///< [T, K]
  bool wide_ids;    ///< int64
  std::int32_t dropped_id;
  const void* scatter;  ///< [sum of T, K] or null
  bool wide_scatter;
  std::int64_t scatter_tokens;  ///< that it has
  /// Rows of windows that do not grow before the rows come: others get no record, and what is sent
  /// for them is sent to the next one of the token on the rank.
  std::int32_t fitting_rows;
  std::int32_t max_per_expert;  ///< topk slots of an expert that a rank may have
  const std::byte* weights;     ///< [T, K] or null
  std::int32_t weight_bytes;
  bool takes_weights;  ///< from all ranks; where this one has no tokens, too
  /// Of the ranks of the node: what they receive, in parts.
  NearPeers<std::byte> peers;
  std::int64_t counts;        ///< bytes from there: [W, num_counts]
  std::int64_t records;       ///< [W, M, record_stride]; several nodes [node_ranks, nodes, M, ..]
  std::int64_t sent_weights;  ///< [W, M, K], in the same order
  std::int64_t gathered;  ///< low latency: [W, M, K] ids, then their weights; sent as counts are
  std::uint64_t* own_counts;
  std::int32_t* own_records;
  std::byte* own_sent_weights;
  std::uint64_t* own_gathered;
  std::int32_t* tile_counts;  ///< scratch: [blocks, num_counts]
  // What the tables hold; see ExpertTableViews.
  std::int32_t* out_ids;
  std::int32_t* dst_rows;
  std::byte* out_weights;   ///< of this dispatch, not of the routing
  std::int64_t* addresses;  ///< [M, K]; on several nodes [nodes, M, K]
  std::int32_t* num_input_tokens;
  std::int32_t* splits;
  std::int32_t* segment_offsets;
  std::int32_t* expert_counts;
  std::int32_t* expert_offsets;
  std::int32_t* num_recv_rows;  ///< [W], then the most of them
  HostCount* host;
  std::uint64_t ticket;
};
static_assert(sizeof(RouteParams) <= 2048);

/// A dispatch by a routing that is there: synchronizes with the others, sends its own weights. On
/// several nodes the others have entered, and the weights are those of all tokens that are
/// forwarded here.
struct EnterParams {
  MoeArrive m;
  MoeShape shape;
  const std::byte* weights;  ///< [T, K], several nodes [nodes, M, K]; or null
  std::int32_t weight_bytes;
  const std::int64_t* addresses;
  std::byte* out_weights;             ///< of this dispatch
  NearPeers<std::byte> sent_weights;  ///< as in RouteParams
};
static_assert(sizeof(EnterParams) <= 2048);

/// Cuts of rows into what passes through shared memory.
struct RowCuts {
  std::int64_t row_bytes;
  std::int32_t scale_bytes;  ///< of a row; 0 without
  std::int32_t piece_bytes;  ///< of a row that are on the way together
  std::int32_t pieces;
  std::int32_t stages;       ///< pieces that a warp has on the way
  std::int32_t stage_bytes;  ///< shared memory of one
  std::int32_t group;        ///< tokens of a channel that are signalled together
  std::int32_t word_bytes;   ///< common alignment, where threads copy

  /// For receivers that do not copy rows, and can wait for a few more: telling costs senders of
  /// short rows a fifth of their time.
  void signal_less() {
    if (row_bytes <= 8192 && group < 16) group = 16;
  }
};

/// How the rows of a source come in a call: by so many channels (a channel: the tokens of one
/// warp), so many tokens at a time; to the receive slot, or to their places.
inline constexpr int channel_config_shift = 24;
inline constexpr std::uint64_t channel_in_slots_bit = std::uint64_t{1} << 23;
__host__ __device__ constexpr std::uint64_t channel_config(std::uint64_t epoch, int channels,
                                                           int group, bool in_slots) {
  return epoch << channel_config_shift | (in_slots ? channel_in_slots_bit : 0) |
         static_cast<std::uint64_t>(channels) << 8 | static_cast<std::uint64_t>(group);
}
inline constexpr int channel_epoch_shift = 20;

/// What senders do before the kernel ahead of theirs on the stream has ended.
enum class EarlyWork : std::int32_t {
  nothing,
  loads,     ///< read their first tokens, whose places are known
  to_slots,  ///< send tokens to the receive slots of their ranks, as no place is known yet
};

/// Several nodes: slots that say which rows of another node have come, a chunk of tokens each.
struct ChunkSlots {
  const std::uint64_t* first;  ///< of node 0
  std::int32_t node_stride;    ///< slots
  std::int32_t shift;          ///< a chunk has 1 << shift tokens
};

/// The slot of the chunk of a node's token.
__host__ __device__ inline const std::uint64_t* slot_of_token(const ChunkSlots& slots,
                                                              std::int32_t node,
                                                              std::int32_t token) {
  return slots.first + std::int64_t{node} * slots.node_stride + (token >> slots.shift);
}

/// Receive slots: where tokens arrive before their rows are known, by source, a row per token.
struct ReceiveSlots {
  NearPeers<std::byte> rows;   ///< [W, tokens] rows of each rank, then their scales
  const std::byte* own_rows;   ///< those of this one
  std::int64_t scales_offset;  ///< from its first row
  std::int32_t tokens;         ///< of a source, at most; 0: there is none
  /// Receivers need nothing else of this rank: groups are signalled before the kernel ahead has
  /// ended.
  bool is_all;
  const void* ids;  ///< [T, K] of this rank's tokens
  bool wide_ids;    ///< int64
};

/// Rows to their places, and what receivers make of them. On several nodes the shape is that of a
/// node, as if it had all tokens that its ranks forward: W is the ranks of a node, M and T are
/// nodes times the most tokens of a rank.
struct RowsParams {
  MoeArrive m;
  MoeShape shape;
  RowCuts cuts;
  std::int32_t num_senders;  ///< blocks that send before they receive
  EarlyWork early_work;
  ReceiveSlots receive_slots;
  const std::byte* tokens;  ///< [T] rows
  const std::byte* scales;  ///< [T, scale_bytes] or null
  const std::int64_t* addresses;
  NearPeers<std::byte> windows;       ///< first row of each rank's window
  std::byte* own_window;              ///< this one's
  std::int64_t scales_offset;         ///< in a window, from its first row
  NearPeers<std::uint64_t> channels;  ///< of each rank: [W, max_channels], then [2, W] configs
  std::uint64_t* own_channels;
  // Several nodes: this rank's own tokens, as if they lay among those of all nodes, and the slots
  // that say which of the others are here to be forwarded.
  const std::byte* own_tokens;
  const std::byte* own_scales;
  ChunkSlots forwarded;
  // The receiver's part.
  const std::int32_t* records;    ///< [W, M, record_stride]
  std::int32_t* kept_records;     ///< the same, in the tables; null when they are the source
  const std::byte* sent_weights;  ///< [W, M, K] or null
  std::int32_t weight_bytes;
  std::byte* kept_weights;  ///< the window's, in the tables; null: not wanted
  const std::int32_t* num_input_tokens;
  const std::int32_t* expert_counts;
  const std::int32_t* expert_offsets;
  const std::int32_t* max_recv_rows;  ///< of all ranks
  MoeHostFaults* faults;
  RowTag* tags;  ///< of the window, as the next two
  std::byte* weights;
  std::int32_t* topk;
  const std::int32_t* known_topk;  ///< what kept_topk holds, once it is filled
  bool fills_tables;               ///< these; else they are null
  bool claims_rows;  ///< primary_rows are -1 at first: a row that is taken twice is reported
  RowTag* kept_tags;
  std::int32_t* primary_rows;
  std::int32_t* topk_slot_rows;
  std::int32_t* compact_to_grouped;
  std::int32_t* grouped_to_compact;
  std::int32_t* kept_topk;
};
static_assert(sizeof(RowsParams) <= 4096);

struct CombineParams {
  MoeArrive m;
  MoeShape shape;
  const std::int64_t* addresses;
  Peers<const std::byte> windows;  ///< of the ranks of the node
  const std::byte* lost_row;       ///< NaN, see lost_address
  std::int32_t primary_only;       ///< one row a rank
  bool in_call;                    ///< ranks have synchronized, and the call is counted
  std::int64_t row_bytes;
  const std::byte* biases[2];
  const std::byte* weights;  ///< [T, K] or null
  std::byte* output;
};
static_assert(sizeof(CombineParams) <= 2048);
static_assert(max_gpu_ranks <= 0xFFFF);  // a place's rank has 16 bits

/// Expert outputs into the combine window, on their own rank.
struct StageParams {
  MoeShape shape;
  FaultSink sink;
  const MoeState* state;
  const std::byte* input;
  std::int64_t num_rows;  ///< of the input
  std::byte* window;      ///< may be the input
  std::int64_t row_bytes;
  const std::int32_t* num_recv_rows;  ///< of this rank
  const std::int32_t* records;        ///< [W, M, K]: sums of a token's rows; null: copies rows
  const std::byte* weights;           ///< of received rows, for weighted sums; or null
  const std::int32_t* num_input_tokens;
};

/// float8 with scales, ahead of the rows' way.
struct QuantizeParams {
  const std::byte* input;  ///< [rows, groups * 128]
  std::uint8_t* elements;
  float* scales;            ///< [rows, groups]
  std::int64_t num_groups;  ///< of all rows
};

// A combine that pushes: ranks send what their experts made of a token to a slab at the token's
// home, which has a row of fixed place for each. docs/decisions/push_combine.md

/// What is pushed, signalled and summed together: some neighbouring tokens, a part of their rows.
struct PushUnits {
  std::int32_t group;       ///< tokens
  std::int32_t parts;       ///< of a row
  std::int32_t part_bytes;  ///< but for the last
};

inline constexpr std::int32_t max_split_tokens = 512;
inline constexpr std::int32_t max_push_parts = 8;
inline constexpr std::int32_t max_push_group = 4;

/// All ranks say the same. @param busiest_tokens of the rank that has the most
__host__ __device__ constexpr PushUnits push_units(std::int32_t busiest_tokens, std::int32_t topk,
                                                   std::int64_t row_bytes) {
  constexpr std::int32_t piece_bytes = 2048;
  PushUnits units{1, 1, static_cast<std::int32_t>(row_bytes)};
  if (busiest_tokens > max_split_tokens) {
    const std::int32_t together = 32 / topk;
    units.group = together < max_push_group ? together : max_push_group;
    return units;
  }
  const auto pieces = static_cast<std::int32_t>((row_bytes + piece_bytes - 1) / piece_bytes);
  units.parts = pieces < max_push_parts ? pieces : max_push_parts;
  units.part_bytes =
      static_cast<std::int32_t>((row_bytes + units.parts - 1) / units.parts + 15) / 16 * 16;
  units.parts = static_cast<std::int32_t>((row_bytes + units.part_bytes - 1) / units.part_bytes);
  return units;
}

/// Units of a rank's tokens, at most: each has a flag of each rank.
constexpr std::int64_t max_push_units(std::int64_t max_tokens, std::int32_t topk) {
  const std::int64_t split = max_tokens < max_split_tokens ? max_tokens : max_split_tokens;
  const std::int32_t group = push_units(max_split_tokens + 1, topk, 1).group;
  const std::int64_t grouped = (max_tokens + group - 1) / group;
  return split * max_push_parts > grouped ? split * max_push_parts : grouped;
}

/// What the sums of tokens begin with.
struct PushBiases {
  const std::byte* rows[2];  ///< as the output; or null
  std::byte* output;
};

/// How a rank moves rows of a combine that pushes; each as it can.
enum class PushWay : std::int32_t {
  bulk,      ///< bulk copies, sm_90 and later: rows are multiples of 16 bytes at such addresses
  words,     ///< words of 16 bytes: the same of rows
  elements,  ///< any
};

struct PushParams {
  MoeArrive m;
  MoeShape shape;
  std::int32_t slots;  ///< rows of a token in a slab
  bool once;           ///< one row of a token from each rank
  bool by_rank;        ///< that row's place: the rank; else its first topk slot there
  bool sums;           ///< a rank's rows of a token become one before they travel
  DType weight_dtype;
  std::int64_t row_bytes;
  // What this rank pushes.
  const std::byte* input;
  std::int64_t num_rows;              ///< of the input
  const std::int32_t* num_recv_rows;  ///< of this rank
  const std::int32_t* records;        ///< [W, M, record_stride]
  const std::int32_t* num_input_tokens;
  const std::byte* received_weights;  ///< of the input's rows, for weighted sums here; or null
  NearPeers<std::byte> slabs;         ///< [M, slots] rows of each rank
  NearPeers<std::uint64_t> flags;     ///< of each rank: [units, W], raised to the epoch
  // What it sums.
  const std::byte* own_slab;
  const std::uint64_t* own_flags;
  const std::int64_t* addresses;
  const std::byte* lost_row;  ///< NaN, see lost_address
  const std::byte* weights;   ///< [T, K] or null
  PushBiases biases;
};
static_assert(sizeof(PushParams) <= 4096);

/// Ranks [first, first + count) wait for each other. Slot r of a rank's signals is raised by rank
/// r of the world.
struct BarrierParams {
  std::int32_t rank;
  std::int32_t first;
  std::int32_t count;
  std::uint64_t* epoch;  ///< of the last one that has ended, on this device
  FaultSink sink;
  std::uint64_t* own;          ///< this rank's slots
  Peers<std::uint64_t> peers;  ///< those of each rank
};

/// What ExpertGradientInput says; null: not given.
struct WeightGradientParams {
  const std::byte* gradients;  ///< [num_rows, hidden]
  const std::byte* weights;    ///< [num_rows]
  const std::byte* rows;
  std::byte* row_gradients;  ///< may be the gradients
  float* weight_gradients;
  std::int64_t hidden;
  std::int64_t num_rows;
  const std::int32_t* num_recv_rows;  ///< that have arrived
};

}  // namespace waybill::cuda
