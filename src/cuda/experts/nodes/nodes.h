#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "../../network/network_path.h"
#include "../../network/path_params.h"
#include "../../rank/gpu_rank.h"
#include "../call_params.h"
#include "../kernels.h"
#include "../tables.h"
#include "experts/expert_executor.h"
#include "schedule/work.h"
#include "schedule/workspace_phase.h"
#include "transport/transport.h"
#include "waybill/core/dtype.h"
#include "waybill/moe/ep_config.h"

namespace waybill::cuda {

/// Rows for another node are signalled in chunks of 1 << shift tokens. A chunk has at most 32
/// tokens and, unless one token is larger, at most 128 KiB. With few tokens chunks are smaller, so
/// that all blocks of a network path have work.
[[nodiscard]] constexpr std::int32_t chunk_shift(std::int64_t row_bytes, std::int64_t max_tokens) {
  constexpr std::int32_t max_shift = 5;
  constexpr std::int64_t max_bytes = max_put_bytes / 2;
  constexpr std::int64_t min_chunks = 32;
  std::int32_t shift = 0;
  while (shift < max_shift && (row_bytes << (shift + 1)) <= max_bytes &&
         (min_chunks << (shift + 1)) <= max_tokens) {
    ++shift;
  }
  return shift;
}

[[nodiscard]] constexpr std::int64_t num_chunks(std::int64_t max_tokens, std::int32_t shift) {
  return (max_tokens + (std::int64_t{1} << shift) - 1) >> shift;
}

/// One part of the workspace, which goes to the ranks with this rank's local index on the other
/// nodes.
struct NodePart {
  std::int64_t from;  ///< first byte for node 0, in this rank's workspace. If the network path can
                      ///< read all memory of the rank, it may also lie outside
  std::int64_t from_node_bytes;  ///< distance to the bytes for the next node; 0: all nodes get the
                                 ///< same
  std::int64_t to;               ///< first byte in the receiver's workspace
  std::int64_t row_bytes;
  std::int64_t total_bytes;  ///< bytes for each node, if the part goes whole
};
inline constexpr int max_node_parts = 2;

/// Which rows go to a node.
enum class NodeFilter : std::uint8_t {
  none,
  tokens,        ///< row t goes if token t of `ids` [M, K] has a topk slot there
  partial_sums,  ///< row t goes if token t of that node's `ids` [nodes, M, K] has a topk slot here
};

/// Parameters of the kernel that writes the program: everything that this rank sends to other nodes
/// in one network path of a call.
struct ListPutsParams {
  MoeArrive m;
  MoeShape shape;
  std::int32_t begins;  ///< the call that begins with this network path (0: a dispatch, 1: a
                        ///< combine); -1: it has begun before, and its epoch is counted
  bool is_open;         ///< the call has begun before, but its epoch is not counted yet
  // If a dispatch counts, the kernel makes the ids of this rank's tokens from the caller's ids.
  const void* given_ids;  ///< [T, K], read only if made_ids is set; null if T is 0
  bool wide_ids;
  std::int32_t dropped_id;
  std::int32_t* made_ids;  ///< [M, K]: num_experts if dropped, -1 if there is no token. Null: the
                           ///< call does not count

  NodeFilter filter;
  const std::int32_t* ids;  ///< like made_ids; read if made_ids is null
  std::int32_t num_whole;
  NodePart whole[max_node_parts];
  std::int32_t num_parts;  ///< parts whose rows are filtered
  NodePart parts[max_node_parts];
  std::int32_t chunk_shift;  ///< a chunk has 1 << chunk_shift tokens
  std::int32_t num_chunks;   ///< chunks per node
  /// Slots at each receiver: whole parts raise slot whole_slot + own node, and chunk c raises slot
  /// chunk_slot + own node * num_chunks + c.
  std::int32_t whole_slot;
  std::int32_t chunk_slot;
  /// Partial sums are made in so many pieces per node, each of piece_tokens tokens. Each piece
  /// raises a counter of the path. 0: there are two pieces, one for the nodes after this one and
  /// one for those before it.
  std::int32_t ready_pieces;
  std::int32_t piece_tokens;
  // Memory for the program. For each other node, in the order of a ring after this one, it has a
  // step with the whole parts, if there are any. Then it has a step per node and chunk of tokens.
  PathState* state;
  NetworkStep* steps;
  NetworkPut* puts;
  BatchSlot* waits;
  BatchSlot* signals;
};

/// Parameters of a kernel that waits for other ranks, between other kernels.
struct WaitNodesParams {
  MoeArrive m;
  MoeShape shape;
  std::int32_t begins;  ///< as in ListPutsParams; unless it is -1, all ranks must have entered the
                        ///< call
  bool of_node;         ///< only ranks of this node must have entered
  bool counts;          ///< the kernel then counts the call
  const std::uint64_t* slots;  ///< the slot of node 0, which its rank raises; null: none
  std::int32_t node_stride;    ///< slots from one node to the next
};

/// Parameters of the kernel that adds the sums of all nodes.
struct AddPartialSumsParams {
  MoeArrive m;
  MoeShape shape;
  ChunkSlots arrived;
  std::int64_t row_bytes;
  const std::int32_t* ids;        ///< [M, K], ids of this rank's tokens
  const std::byte* partial_sums;  ///< [nodes, M] rows from the other nodes
  const std::byte* own_sums;      ///< [M] rows of this node
  const std::byte* biases[2];
  std::byte* output;
};

// Rows between nodes if the host must know their number (NCCL): rows that a node needs are packed
// at the front of a slice. See schedule/workspace_phase.h.

/// Lists which tokens of this rank go to each node ([0, n]), and which tokens of node n come here
/// ([1, n]).
struct NodeRowsParams {
  MoeShape shape;
  const std::int32_t* ids;  ///< [nodes, M, K]
  std::int32_t* tokens;     ///< [2, nodes, M], in ascending order
  std::int32_t* counts;     ///< [2, nodes]
  HostCount* host;          ///< the counts again, with the ticket
  std::uint64_t ticket;
};

/// Parameters of the kernel that packs or unpacks rows.
struct MoveNodeRowsParams {
  MoeShape shape;
  const std::int32_t* tokens;  ///< [nodes, M]: row i of a packed slice is row tokens[i]
  const std::int32_t* counts;  ///< [nodes]
  bool packs;
  const std::byte* from;         ///< rows of node 0
  std::int64_t from_node_bytes;  ///< distance to the rows of the next node
  std::byte* to;
  std::int64_t to_node_bytes;
  std::int64_t row_bytes;
};

cudaError_t launch_node_rows(const NodeRowsParams& params, cudaStream_t stream);
/// @param word_bytes common_word() of all that it reads and writes
cudaError_t launch_move_node_rows(const MoveNodeRowsParams& params, int word_bytes, int blocks,
                                  cudaStream_t stream);

// Launches of the kernels that a layer over several nodes adds to those of kernels.h.

/// Loads these kernels.
cudaError_t prepare_nodes(DType tokens);

/// Writes the program of a network path, and the ids as other nodes read them. If the call begins
/// here, it also signals that to the ranks of the node.
cudaError_t launch_list_puts(const ListPutsParams& params, cudaStream_t stream);

/// Raises a counter of the current call's network path. Everything that was queued before is then
/// complete.
cudaError_t launch_raise_ready(const MoeArrive& arrive, std::uint64_t* ready, cudaStream_t stream);

cudaError_t launch_wait_nodes(const WaitNodesParams& params, cudaStream_t stream);

/// Finds runs of tokens which other nodes sent here, see node_send_requests.
/// @param ids [nodes, M, K]
/// @param runs [nodes, 2, M]
cudaError_t launch_node_runs(const MoeShape& shape, const std::int32_t* ids, std::int32_t* runs,
                             cudaStream_t stream);

/// Sums the biases and then the sums of all nodes, in float32, in the order of nodes, rounded once.
/// It waits for the sums of other nodes as it needs them.
/// @param wide words of 16 bytes
cudaError_t launch_add_partial_sums(const AddPartialSumsParams& params, DType dtype, bool wide,
                                    int blocks, cudaStream_t stream);

/// A range of the tokens whose sums a rank makes for other nodes. The network path waits for each.
struct SumPiece {
  std::int64_t first;  ///< index in [nodes, M]
  std::int64_t count;
  std::int32_t ready;  ///< index of the counter that is raised when the sums are made
};

/// The part of a layer that several nodes add. A token goes once to each other node, to the rank
/// with this rank's local index, which then treats it like its own tokens. Sums return the same
/// way. Usually one network path, started when a call begins, carries everything in chunks. If the
/// host must know what is sent, each step of the call has its own path. It carries the rows that a
/// node needs if hosts know the counts, and whole slices otherwise.
class ExpertNodes {
 public:
  /// The SMs, among `num_sms`, for a network path that runs during other kernels.
  [[nodiscard]] static int path_sms(int num_sms);
  /// The other SMs.
  [[nodiscard]] static int kernel_sms(int num_sms);

  /// Collective.
  ExpertNodes(const GpuExpertLayer& layer, NetworkPath& path, const ExpertParams& params);
  ExpertNodes(const ExpertNodes&) = delete;
  ExpertNodes& operator=(const ExpertNodes&) = delete;
  ~ExpertNodes();
  /// Collective.
  void release();

  /// Begins a dispatch: synchronizes with all ranks, exchanges weights if there are any, and
  /// exchanges ids if the dispatch counts. Rows follow without another call if the device decides
  /// what is sent, and does not plan copies from these ids first. Quantised rows must be in place.
  void begin_dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                      const GpuExpertRouting& routing, bool counts, int num_sms);

  /// Begins to send rows to the slots that stand in place of the ids that were exchanged, if the
  /// device decides what is sent. Call it before the route.
  void send_planned(const ExpertCall& call, const ExpertDispatchInput& input,
                    const GpuExpertRouting& routing, int num_sms);

  /// Counts rows between nodes. Call it after the begin of a dispatch that counts, before the
  /// route.
  void count_rows(const ExpertCall& call, GpuExpertRouting& made) const;

  /// Makes the table of runs from the table of ids.
  void note_runs(const ExpertCall& call, GpuExpertRouting& made) const;

  /// Begins to exchange rows if that needs another call, and sets where the kernel of the node
  /// finds them. Call it before that kernel.
  void start_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                  const GpuExpertRouting& routing, int num_sms, RowsParams& rows);

  /// Call it after that kernel. Other kernels may follow.
  void finish_rows(const ExpertCall& call);

  /// Begins a combine. After it the expert outputs of the node's ranks are in the combine windows.
  void begin_combine(const ExpertCall& call, const GpuExpertRouting& routing, int num_sms);

  /// Where the combine of a node's ranks leaves sums: [nodes, M] rows, by home node.
  [[nodiscard]] std::byte* sums() const {
    return layer_.memory.workspace.local + layer_.memory.workspace_layout.sums;
  }

  /// Which sums are made for other nodes, in the order of sending. Call finish_piece() after each.
  [[nodiscard]] std::vector<SumPiece> pieces() const;
  void finish_piece(const ExpertCall& call, const SumPiece& piece);

  /// Call it after all pieces and before the sums of this node.
  void finish_pieces(const ExpertCall& call, const GpuExpertRouting& routing, int num_sms);

  /// Adds the sums of this node and of the other nodes.
  void add_partial_sums(const ExpertCall& call, const ExpertCombineInput& input,
                        const GpuExpertRouting& routing, int num_sms);

  /// Where this rank's rows and scales lie in the workspace.
  [[nodiscard]] std::byte* own_rows() const;
  [[nodiscard]] std::byte* own_scales() const;

 private:
  /// The rows and parts that one phase sends.
  struct Phase {
    NodeRows rows;
    std::vector<WorkspacePart> parts;
    std::function<void(cudaStream_t)> unpack;
  };

  void make_program();
  [[nodiscard]] PathTables path_tables(const ListPutsParams& params) const;

  // Rows between nodes if the host must know what is sent (NCCL) and knows how many rows each node
  // needs: rows are packed, sent and unpacked. This needs no memory of its own: during a dispatch
  // the arrays of sums are free, and during a combine the sender's array is free when its sums are
  // packed.

  /// Whether hosts know the counts. They do if windows may grow, because then each host has waited
  /// for them. All ranks get the same answer.
  [[nodiscard]] static bool are_known(const ExpertCall& call) { return call.may_grow; }
  [[nodiscard]] Phase pack_tokens(const ExpertCall& call, const GpuExpertRouting& routing,
                                  int sms) const;
  [[nodiscard]] Phase pack_sums(const ExpertCall& call, const GpuExpertRouting& routing,
                                int sms) const;
  [[nodiscard]] MoveNodeRowsParams rows_of(const GpuExpertRouting& routing, bool come) const;
  [[nodiscard]] int pack_blocks() const;
  void move(const MoveNodeRowsParams& params, int blocks, cudaStream_t stream,
            const char* operation) const;

  [[nodiscard]] ListPutsParams list(const ExpertCall& call, const GpuExpertRouting& routing,
                                    FaultKind kind) const;
  [[nodiscard]] std::int32_t* own_ids() const;
  void add_ids(const ExpertDispatchInput& input, ListPutsParams& params) const;
  void add_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                   ListPutsParams& params) const;
  void add_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                const GpuExpertRouting& routing, ListPutsParams& params) const;
  void add_partial_sums_to(const GpuExpertRouting& routing, ListPutsParams& params) const;
  [[nodiscard]] NodePart own_slice_of(std::int64_t part, std::int64_t row_bytes,
                                      std::int64_t rows) const;
  [[nodiscard]] std::int64_t row_offset(const ExpertCall& call, const ConstTensorView& from,
                                        std::byte* in_workspace, std::int64_t row_bytes) const;
  void start(const ListPutsParams& params, const ExpertCall& call, int num_sms,
             std::function<void(cudaStream_t)> unpack = {});
  void start_phase(const ListPutsParams& params, const Phase& phase, ExpertSignal signal,
                   const ExpertCall& call, int num_sms);
  [[nodiscard]] Phase whole(std::span<const NodePart> parts) const;
  [[nodiscard]] WaitNodesParams wait_params(const ListPutsParams& params) const;
  void launch(const WaitNodesParams& params, const ExpertCall& call) const;
  [[nodiscard]] ChunkSlots chunk_slots(ExpertSignal signal) const;
  [[nodiscard]] const std::uint64_t* whole_slots(ExpertSignal signal) const;
  void copy(std::byte* to, const ConstTensorView& from, std::int64_t row_bytes,
            const ExpertCall& call) const;
  [[nodiscard]] std::int32_t other_nodes() const { return layer_.config.num_nodes() - 1; }
  [[nodiscard]] std::int64_t own_slice() const { return own_node_ * layer_.config.max_tokens; }
  [[nodiscard]] std::int32_t local_rank() const {
    return layer_.config.rank % layer_.config.local_world_size;
  }

  const GpuExpertLayer& layer_;
  NetworkPath& path_;
  const ExpertParams& params_;
  const bool by_phases_;  ///< the host must know what is sent
  const std::int32_t own_node_;
  const std::int64_t sum_bytes_;    ///< bytes of a row of sums
  const std::int64_t token_bytes_;  ///< bytes of a token's row that travels
  const std::int64_t scale_bytes_;  ///< bytes of its scales
  /// All calls share the sizes of the network program, and its memory, which the device writes
  /// chunk by chunk.
  ListPutsParams program_{};
  std::shared_ptr<void> program_memory_;
  unsigned* done_ = nullptr;        ///< used by the network path: puts of a step that have arrived
  std::uint64_t* ready_ = nullptr;  ///< counters of partial sums that are made
  SignalPad pad_;       ///< raised by other ranks when their chunks have arrived: [nodes] for whole
                        ///< parts, then [nodes, num_chunks]
  NetworkPhase phase_;  ///< used only if the host must know what is sent
};

}  // namespace waybill::cuda
