#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "../device/params.h"
#include "experts/row_tag.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {

inline constexpr int max_channels = 1024;           ///< warps of one rank that send rows
inline constexpr int ring_warps = 7;                ///< warps of one block that move rows
inline constexpr int max_low_latency_tokens = 128;  ///< limit of a rank's tokens in low latency

/// Counters of one layer, in the memory of its rank's device.
struct MoeState {
  CallState call;
  std::uint32_t last_parity[2];  ///< 1 + parity of the last dispatch and of the last combine; 0
                                 ///< before the first
  std::uint32_t next_unit;  ///< the next unit of arrived rows that the running dispatch hands out
  std::uint32_t arrived_blocks;  ///< blocks of the running kernel that have reached wait_blocks()
  std::uint64_t begun;           ///< epoch of the running dispatch; 0 when none runs
};

/// After the state there is one word per source rank. A low-latency route raises it to its epoch
/// when it has placed the source's tokens and written everything that receivers read about them.
inline constexpr std::int64_t moe_state_bytes(std::int32_t world_size) {
  return std::int64_t{sizeof(MoeState)} + world_size * std::int64_t{sizeof(std::uint64_t)};
}
__host__ __device__ inline std::uint64_t* placed_slot(MoeState* state, std::int32_t source) {
  return reinterpret_cast<std::uint64_t*>(state + 1) + source;
}

/// The shape of a layer as one rank sees it.
struct MoeShape {
  std::int32_t rank;
  std::int32_t world_size;
  std::int32_t num_experts;
  std::int32_t experts_per_rank;
  std::int32_t topk;
  std::int32_t num_tokens;  ///< this rank's tokens in this call
  std::int32_t max_tokens;
  std::int32_t compact;  ///< 1: one row per token and rank; 0: one row per topk slot
  std::int32_t alignment;
  std::int32_t num_nodes;
  std::int32_t node_ranks;     ///< ranks per node
  std::int32_t first_rank;     ///< the first rank of this rank's node
  std::int64_t capacity_rows;  ///< rows that a window holds
};

/// Number of counts that a rank sends to each other rank before rows can be placed: topk slots per
/// expert, dropped topk slots, and tokens per destination rank.
__host__ __device__ constexpr std::int32_t num_counts(const MoeShape& s) {
  return s.num_experts + 1 + s.world_size;
}

/// The rank that comes k places after this one, in a ring. @pre 0 <= k < world_size
__host__ __device__ constexpr std::int32_t rank_after(const MoeShape& s, std::int32_t k) {
  const std::int32_t r = s.rank + k;
  return r < s.world_size ? r : r - s.world_size;
}

/// The index of this rank's node.
__host__ __device__ constexpr std::int32_t own_node(const MoeShape& s) {
  return s.first_rank / s.node_ranks;
}

/// Number of int32 in a record. The sender of a token writes one record to each rank of the node:
/// the row of each topk slot on that rank, or -1 if the slot goes elsewhere. With compact rows the
/// record holds positions in the grouped order, followed by the token's compact row.
__host__ __device__ constexpr std::int32_t record_stride(const MoeShape& s) {
  return s.topk + s.compact;
}

// The remote address of a topk slot: its row in the lower half, its rank within the node above
// that. It is negative if the slot was dropped or goes to another node.
inline constexpr int address_dst_shift = 32;
/// Set in the address of a token's first topk slot on each rank.
inline constexpr std::int64_t primary_row_bit = std::int64_t{1} << 48;
/// Stands for the address of a row that did not fit into its window.
inline constexpr std::int64_t lost_address =
    (std::int64_t{max_gpu_ranks} << address_dst_shift) + primary_row_bit;

/// A word that the device writes to pinned host memory when a dispatch knows its counts: [W]
/// received rows of each rank, with the ticket of the route in the upper half. If the host must
/// know what crosses between nodes, the rows to each node and from each node follow
/// (NodeRowsParams).
using HostCount = volatile std::uint64_t;
inline constexpr int ticket_shift = 32;

/// A count travels with the lower half of the call's epoch in its upper half: a reader that sees
/// the epoch has the count.
inline constexpr int count_epoch_shift = 32;

/// The device reports here, in pinned host memory, that windows were too small: 0 if all rows fit,
/// else the number of rows that the busiest rank should have received, with the lower half of the
/// call's epoch in the upper half.
using HostOverflow = volatile std::uint64_t;
inline constexpr int overflow_epoch_shift = 32;

/// The part of a call's parameters that says how ranks synchronize.
struct MoeArrive {
  ArriveParams arrive;  ///< its slots are ExpertSignal::entered, its state is MoeState::call
  MoeState* state;
  std::uint32_t parity;        ///< parity of this dispatch or combine
  std::uint32_t max_delay_ns;  ///< upper limit of the delays that tests ask for; 0 outside tests
};

/// Parameters of a route: count, exchange counts, place. T, M and K are this rank's tokens,
/// max_tokens and topk; W is the number of ranks. With several nodes this rank routes the tokens
/// that it forwards: those of the ranks with its local index, one rank per node. Then the ids are
/// int32 [nodes, M, K], with -1 where there is no token, and the weights are [nodes, M, K], too.
struct RouteParams {
  MoeArrive m;
  MoeShape shape;
  const void* ids;  ///< [T, K]
  bool wide_ids;    ///< the ids are int64
  std::int32_t dropped_id;
  const void* scatter;  ///< [sum of all ranks' T, K] or null
  bool wide_scatter;
  std::int64_t scatter_tokens;  ///< tokens that the scatter indices cover
  /// Rows that fit into windows which cannot grow before the rows arrive. A topk slot whose row
  /// does not fit gets no record; the token is then sent to its next row on that rank.
  std::int32_t fitting_rows;
  std::int32_t max_per_expert;  ///< topk slots that one rank may have for one expert
  const std::byte* weights;     ///< [T, K] or null
  std::int32_t weight_bytes;
  bool takes_weights;  ///< ranks send weights in this call, even if this rank has no tokens
  /// Memory of the node's ranks, in which the next four members are byte offsets.
  NearPeers<std::byte> peers;
  std::int64_t counts;        ///< [W, num_counts]
  std::int64_t records;       ///< [W, M, record_stride]; several nodes: [node_ranks, nodes, M,
                              ///< record_stride]
  std::int64_t sent_weights;  ///< [W, M, K], ordered as the records
  std::int64_t gathered;      ///< low latency: [W, M, K] ids, then their weights, as flagged words
  std::uint64_t* own_counts;
  std::int32_t* own_records;
  std::byte* own_sent_weights;
  std::uint64_t* own_gathered;
  std::int32_t* tile_counts;  ///< scratch, [blocks, num_counts]
  // The tables that the route fills; see ExpertTableViews.
  std::int32_t* out_ids;
  std::int32_t* dst_rows;
  std::byte* out_weights;   ///< belongs to this dispatch, not to the routing
  std::int64_t* addresses;  ///< [M, K]; several nodes: [nodes, M, K]
  std::int32_t* num_input_tokens;
  std::int32_t* splits;
  std::int32_t* segment_offsets;
  std::int32_t* expert_counts;
  std::int32_t* expert_offsets;
  std::int32_t* num_recv_rows;  ///< [W], then their maximum
  HostCount* host;
  std::uint64_t ticket;
};
static_assert(sizeof(RouteParams) <= 2048);

/// Parameters of a dispatch with an earlier routing: ranks synchronize and send their weights. With
/// several nodes the ranks have synchronized before, and the weights are those of all tokens that
/// this rank forwards.
struct EnterParams {
  MoeArrive m;
  MoeShape shape;
  const std::byte* weights;  ///< [T, K]; several nodes: [nodes, M, K]; or null
  std::int32_t weight_bytes;
  const std::int64_t* addresses;
  std::byte* out_weights;             ///< belongs to this dispatch
  NearPeers<std::byte> sent_weights;  ///< as in RouteParams
};
static_assert(sizeof(EnterParams) <= 2048);

/// How rows are cut into pieces that pass through shared memory.
struct RowCuts {
  std::int64_t row_bytes;
  std::int32_t scale_bytes;  ///< scale bytes of one row; 0 without scales
  std::int32_t piece_bytes;  ///< bytes of a row that are loaded at once
  std::int32_t pieces;
  std::int32_t stages;       ///< pieces that one warp may have in flight
  std::int32_t stage_bytes;  ///< shared memory of one piece in flight
  std::int32_t group;        ///< tokens of a channel that one signal announces
  std::int32_t word_bytes;   ///< alignment that all rows share, for copies by threads

  /// Signals larger groups, for receivers that do not copy rows and so can wait a little longer.
  /// Small groups of short rows cost the senders a fifth of their time.
  void signal_less() {
    if (row_bytes <= 8192 && group < 16) group = 16;
  }
};

/// A sender announces how its rows arrive in a call: in how many channels (the tokens of one warp
/// are a channel), how many tokens per signal, and whether in receive slots or in their final rows.
inline constexpr int channel_config_shift = 24;
inline constexpr std::uint64_t channel_in_slots_bit = std::uint64_t{1} << 23;
__host__ __device__ constexpr std::uint64_t channel_config(std::uint64_t epoch, int channels,
                                                           int group, bool in_slots) {
  return epoch << channel_config_shift | (in_slots ? channel_in_slots_bit : 0) |
         static_cast<std::uint64_t>(channels) << 8 | static_cast<std::uint64_t>(group);
}
inline constexpr int channel_epoch_shift = 20;

/// Work that senders may do before the previous kernel on the stream has ended.
enum class EarlyWork : std::int32_t {
  nothing,
  loads,     ///< read their first tokens, whose addresses are known
  to_slots,  ///< send tokens to receive slots, as their addresses are not known yet
};

/// Several nodes: slots that are raised when a chunk of another node's rows has arrived.
struct ChunkSlots {
  const std::uint64_t* first;  ///< the first slot of node 0
  std::int32_t node_stride;    ///< slots per node
  std::int32_t shift;          ///< a chunk has 1 << shift tokens
};

/// The slot of the chunk that holds this token of this node.
__host__ __device__ inline const std::uint64_t* slot_of_token(const ChunkSlots& slots,
                                                              std::int32_t node,
                                                              std::int32_t token) {
  return slots.first + std::int64_t{node} * slots.node_stride + (token >> slots.shift);
}

/// Receive slots: tokens arrive here before their rows are known. There is one row per source rank
/// and token.
struct ReceiveSlots {
  NearPeers<std::byte> rows;   ///< [W, tokens] rows in the memory of each rank, then their scales
  const std::byte* own_rows;   ///< the receive slots of this rank
  std::int64_t scales_offset;  ///< byte offset of the scales from the first row
  std::int32_t tokens;         ///< receive slots per source rank; 0: the layer has none
  /// Receivers need nothing else from this rank, so it signals groups before the previous kernel
  /// has ended.
  bool is_all;
  const void* ids;  ///< [T, K], this rank's ids
  bool wide_ids;    ///< the ids are int64
};

/// Parameters of the kernel that sends rows to their addresses and takes those that arrive. With
/// several nodes the shape is that of one node whose ranks own all tokens that they forward: W is
/// node_ranks, and both M and T are the number of nodes times max_tokens.
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
  std::byte* own_window;              ///< first row of this rank's window
  std::int64_t scales_offset;         ///< byte offset of the scales from a window's first row
  NearPeers<std::uint64_t> channels;  ///< each rank's [W, max_channels] counters, then [2, W]
                                      ///< configs
  std::uint64_t* own_channels;
  // Several nodes: this rank's own tokens, addressed as if they lay among those of all nodes, and
  // the slots that say which tokens of other nodes have arrived and can be forwarded.
  const std::byte* own_tokens;
  const std::byte* own_scales;
  ChunkSlots forwarded;
  // The receiver's part.
  const std::int32_t* records;  ///< [W, M, record_stride]
  std::int32_t* kept_records;   ///< copy of the records in the tables; null if `records` already is
                                ///< that copy
  const std::byte* sent_weights;  ///< [W, M, K] or null
  std::int32_t weight_bytes;
  std::byte* kept_weights;  ///< copy of the window's weights in the tables; null if nobody needs it
  const std::int32_t* num_input_tokens;
  const std::int32_t* expert_counts;
  const std::int32_t* expert_offsets;
  const std::int32_t* max_recv_rows;  ///< maximum over all ranks
  HostOverflow* overflow;
  RowTag* tags;  ///< tags, weights and topk are parts of the window
  std::byte* weights;
  std::int32_t* topk;
  const std::int32_t* known_topk;  ///< content of kept_topk after the first dispatch
  bool fills_tables;               ///< the tables below are written; else they are null
  bool claims_rows;  ///< primary_rows are -1 at first, so that a row which is taken twice can be
                     ///< reported
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
  Peers<const std::byte> windows;  ///< windows of the node's ranks
  const std::byte* lost_row;       ///< a row of NaN, see lost_address
  std::int32_t primary_only;       ///< 1: sum one row per rank, its primary row
  bool in_call;  ///< the ranks have synchronized, and the call is counted elsewhere
  std::int64_t row_bytes;
  const std::byte* biases[2];
  const std::byte* weights;  ///< [T, K] or null
  std::byte* output;
};
static_assert(sizeof(CombineParams) <= 2048);
static_assert(max_gpu_ranks <= 0xFFFF);  // an address has 16 bits for the rank

/// Parameters of kernels that bring expert outputs into this rank's combine window.
struct StageParams {
  MoeShape shape;
  FaultSink sink;
  const MoeState* state;
  const std::byte* input;
  std::int64_t num_rows;  ///< rows of the input
  std::byte* window;      ///< may be the input
  std::int64_t row_bytes;
  const std::int32_t* num_recv_rows;  ///< rows that this rank has received
  const std::int32_t* records;  ///< [W, M, K] to sum the rows of each token; null to copy rows
  const std::byte* weights;     ///< weights of received rows, for weighted sums; or null
  const std::int32_t* num_input_tokens;
};

/// Parameters of the conversion to rows of a PayloadFormat, which precedes the dispatch.
struct QuantizeParams {
  const std::byte* input;  ///< [num_rows, hidden]
  std::byte* elements;
  std::byte* scales;  ///< [num_rows, scale_bytes]
  std::int64_t num_rows;
  std::int64_t hidden;
  std::int64_t scale_bytes;
};

/// Partial sums of a weight's gradient: gradient_partial_sums, for the device.
inline constexpr int weight_gradient_sums = 256;

/// Parameters of the gradients of a weighted combine, as in ExpertGradientInput; null: not given.
struct WeightGradientParams {
  const std::byte* gradients;  ///< [num_rows, hidden]
  const std::byte* weights;    ///< [num_rows]
  const std::byte* rows;
  std::byte* row_gradients;  ///< may be the gradients
  float* weight_gradients;
  std::int64_t hidden;
  std::int64_t num_rows;
  const std::int32_t* num_recv_rows;  ///< rows that have arrived
};

/// Launches a kernel.
/// @param early the kernel may take its place on the device before the previous kernel on the
///   stream has ended; it calls wait_earlier_kernel() before it reads what that one writes
template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared,
                          bool early, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

/// Loads kernels into the context of the current device.
/// @return cudaErrorInvalidValue if a kernel is null
template <class... Kernels>
cudaError_t load_kernels(Kernels... kernels) {
  cudaFuncAttributes unused{};
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...}) {
    if (kernel == nullptr) return cudaErrorInvalidValue;
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Each prepare_ function loads kernels into the context of the current device. A launch that loads
// its kernel would wait for the device, on which the kernel of another rank may wait for this one.
// All blocks of kernels that synchronize must fit on the device at once.

/// Upper limit of experts: their counts must fit into shared memory.
[[nodiscard]] int max_experts_on_gpu(int world_size);

/// Number of blocks of a route: few for few tokens, at most num_sms. With several nodes this is the
/// number per source, at least one, and at most num_sms for all sources together.
[[nodiscard]] int route_blocks(const MoeShape& shape, int num_sms);

cudaError_t prepare_route(bool nodes);

/// Counts, exchanges counts with the other ranks, places the topk slots and fills the tables. It
/// begins and ends an epoch.
cudaError_t launch_route(const RouteParams& params, int blocks, cudaStream_t stream);

/// Whether a layer may use the low-latency route: it has one node, and the counts and ids of all
/// ranks fit into shared memory. All ranks get the same answer.
[[nodiscard]] bool low_latency_route_fits(const MoeShape& shape);

cudaError_t prepare_low_latency_route();

[[nodiscard]] int low_latency_route_blocks(const MoeShape& shape, int num_sms);

/// Does the work of launch_route(), but from the ids of all ranks. This is faster for few tokens.
cudaError_t launch_low_latency_route(const RouteParams& params, int blocks, bool early,
                                     cudaStream_t stream);

/// Begins a dispatch with an earlier routing: synchronizes with the other ranks, and sends the
/// weights if there are any.
cudaError_t launch_enter(const EnterParams& params, int blocks, bool early, cudaStream_t stream);

/// Brings the parities of dispatches and combines to those of the next calls. If they are off,
/// because a graph held an odd number of either, it makes an empty call. One node only.
cudaError_t launch_realign(const MoeArrive& arrive, std::uint32_t next_dispatch,
                           std::uint32_t next_combine, cudaStream_t stream);

/// Cuts rows into pieces.
/// @param bulk rows and scales have multiples of 16 bytes and start at such addresses
[[nodiscard]] RowCuts cut_rows(std::int64_t row_bytes, std::int32_t scale_bytes, bool bulk,
                               int word_bytes);

cudaError_t prepare_rows(bool bulk);

/// Sends rows to the windows of all ranks, and ends when the rows of all ranks have arrived here.
/// It belongs to the epoch of the route or enter before it.
/// @param bulk bulk copies (sm_90 and later), with cuts made for them
cudaError_t launch_rows(const RowsParams& params, bool bulk, bool early, int blocks,
                        cudaStream_t stream);

cudaError_t prepare_combine(DType tokens, DType weights, bool bulk);

/// Pulls the rows of each token from the combine windows and sums them. It begins and ends an
/// epoch.
/// @param bulk bulk copies (sm_90 and later); rows have multiples of 16 bytes
cudaError_t launch_combine(const CombineParams& params, DType tokens, DType weights, bool bulk,
                           int blocks, bool early, cudaStream_t stream);

cudaError_t prepare_stage(DType dtype, DType weights);

/// Checks that the input has all rows that have arrived. If it does not, the kernel reports that
/// and ends the context. The next two kernels check it themselves.
cudaError_t launch_check_rows(const StageParams& params, cudaStream_t stream);

/// Copies all received rows from the input to the window.
cudaError_t launch_copy_rows(const StageParams& params, int word_bytes, int blocks,
                             cudaStream_t stream);

/// Sums the rows of each token into its primary row, with weights if the parameters have them.
/// @param wide words of 16 bytes
cudaError_t launch_sum_rows(const StageParams& params, DType dtype, DType weights, bool wide,
                            int blocks, cudaStream_t stream);

/// @return cudaErrorInvalidValue if there is no kernel for the format with this name
cudaError_t prepare_quantize(std::string_view format, DType dtype);

/// Converts rows of `dtype` to a format, bit for bit as quantize_row(). It waits for nobody.
cudaError_t launch_quantize(const QuantizeParams& params, std::string_view format, DType dtype,
                            cudaStream_t stream);

cudaError_t prepare_weight_gradient(DType tokens, DType weights);

/// Computes the gradients of a weighted combine.
/// @param wide rows have multiples of 8 elements, and all addresses are multiples of 16 bytes
cudaError_t launch_weight_gradient(const WeightGradientParams& params, DType tokens, DType weights,
                                   bool wide, int blocks, cudaStream_t stream);

}  // namespace waybill::cuda
