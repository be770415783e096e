#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "../../network/network_path.h"
#include "../../rank/gpu_rank.h"
#include "../call_params.h"
#include "../tables.h"
#include "experts/expert_executor.h"
#include "params.h"
#include "schedule/workspace_phase.h"
#include "transport/transport.h"
#include "waybill/moe/ep_config.h"

namespace waybill::cuda {

/// A range of the tokens whose sums a rank makes for other nodes. The network path waits for each.
struct SumPiece {
  std::int64_t first;  ///< index in [nodes, M]
  std::int64_t count;
  std::int32_t ready;  ///< index of the counter that is raised when the sums are made
};

/// Memory for the network program of a call, which the device writes chunk by chunk, and the slots
/// that other ranks raise when their chunks have arrived.
class ChunkProgram {
 public:
  /// Collective.
  /// @param max_row_bytes the largest row that is sent
  ChunkProgram(const GpuExpertLayer& layer, std::int64_t max_row_bytes);
  ChunkProgram(const ChunkProgram&) = delete;
  ChunkProgram& operator=(const ChunkProgram&) = delete;
  ~ChunkProgram();

  /// Gives the kernel that writes the program its memory and sizes.
  void add_to(ListPutsParams& params) const;
  /// The tables of the program that the parameters describe.
  [[nodiscard]] PathTables tables(const ListPutsParams& params) const;
  [[nodiscard]] PathState* state() const { return program_.state; }

  [[nodiscard]] const SignalPad& pad() const { return pad_; }
  [[nodiscard]] const std::uint64_t* whole_slots() const { return pad_.local; }
  [[nodiscard]] ChunkSlots chunk_slots() const {
    return {pad_.local + layer_.config.num_nodes(), num_chunks_, chunk_shift_};
  }

  /// Which sums are made for other nodes, in the order of sending.
  [[nodiscard]] std::vector<SumPiece> pieces() const;
  [[nodiscard]] std::uint64_t* ready(const SumPiece& piece) const { return ready_ + piece.ready; }

 private:
  [[nodiscard]] std::int64_t others() const { return layer_.config.num_nodes() - 1; }

  const GpuExpertLayer& layer_;
  std::int32_t chunk_shift_;
  std::int32_t num_chunks_;        ///< chunks per node
  std::int32_t ready_pieces_ = 0;  ///< pieces per node; 0: see ListPutsParams
  std::int64_t piece_tokens_ = 0;
  SignalPad pad_;  ///< [nodes] for whole parts, then [nodes, num_chunks]
  std::shared_ptr<void> tables_;
  PathProgram program_{};
  unsigned* done_ = nullptr;        ///< used by the network path: puts of a step that have arrived
  std::uint64_t* ready_ = nullptr;  ///< counters of partial sums that are made
};

/// Rows between nodes if the host must know what is sent (NCCL) and knows how many rows each node
/// needs: rows are packed, sent and unpacked. It needs no memory of its own: during a dispatch the
/// arrays of sums are free, and during a combine the sender's array is free when its sums are
/// packed.
class NodeSlices {
 public:
  /// The rows and parts that one phase sends.
  struct Phase {
    NodeRows rows;
    std::vector<WorkspacePart> parts;
    std::function<void(cudaStream_t)> unpack;
  };

  NodeSlices(const GpuExpertLayer& layer, const ExpertParams& params);

  /// Whether hosts know the counts. They do if windows may grow, because then each host has waited
  /// for them. All ranks get the same answer.
  [[nodiscard]] static bool are_known(const ExpertCall& call) { return call.may_grow; }
  /// Whether packed rows of a dispatch fit into the arrays of sums.
  [[nodiscard]] bool fit() const;

  /// Counts the rows. Call it before the route, when all ids have arrived.
  void count(const ExpertCall& call, GpuExpertRouting& made) const;

  /// Packs this rank's slice of tokens and scales from the workspace.
  [[nodiscard]] Phase pack_tokens(const ExpertCall& call, const GpuExpertRouting& routing,
                                  int path_sms) const;
  /// Packs the sums for other nodes.
  [[nodiscard]] Phase pack_sums(const ExpertCall& call, const GpuExpertRouting& routing,
                                int path_sms) const;

 private:
  enum class Direction : std::uint8_t { to_nodes, from_nodes };  ///< which rows, see NodeRowsParams

  [[nodiscard]] MoveNodeRowsParams rows_of(const GpuExpertRouting& routing,
                                           Direction direction) const;
  [[nodiscard]] int pack_blocks() const;
  void move(const MoveNodeRowsParams& params, int blocks, cudaStream_t stream,
            const char* operation) const;

  const GpuExpertLayer& layer_;
  const ExpertParams& params_;
  std::int64_t sum_bytes_;    ///< bytes of a row of sums
  std::int64_t token_bytes_;  ///< bytes of a row that travels
  std::int64_t scale_bytes_;  ///< bytes of its scales
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

  ExpertNodes(const GpuExpertLayer& layer, NetworkPath& path, const ExpertParams& params);
  ExpertNodes(const ExpertNodes&) = delete;
  ExpertNodes& operator=(const ExpertNodes&) = delete;
  ~ExpertNodes() = default;

  /// Begins a dispatch: synchronizes with all ranks, exchanges weights if there are any, and
  /// exchanges ids if the dispatch counts. Rows follow without another call if the device decides
  /// what is sent. Quantised rows must be in place.
  void begin_dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                      const GpuExpertRouting& routing, bool counts, int num_sms);

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
  [[nodiscard]] std::vector<SumPiece> pieces() const { return program_.pieces(); }
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
  [[nodiscard]] ListPutsParams list(const ExpertCall& call, const GpuExpertRouting& routing,
                                    FaultKind kind) const;
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
  void start_phase(const ListPutsParams& params, const NodeSlices::Phase& phase,
                   ExpertSignal signal, const ExpertCall& call, int num_sms);
  [[nodiscard]] NodeSlices::Phase whole(std::span<const NodePart> parts) const;
  [[nodiscard]] WaitNodesParams wait_params(const ListPutsParams& params) const;
  void launch(const WaitNodesParams& params, const ExpertCall& call) const;
  [[nodiscard]] ChunkSlots chunk_slots(ExpertSignal signal) const;
  [[nodiscard]] const std::uint64_t* whole_slots(ExpertSignal signal) const;
  void copy(std::byte* to, const ConstTensorView& from, std::int64_t row_bytes,
            const ExpertCall& call) const;
  [[nodiscard]] std::int64_t own_slice() const { return own_node_ * layer_.config.max_tokens; }
  [[nodiscard]] std::int32_t local_rank() const {
    return layer_.config.rank % layer_.config.local_world_size;
  }

  const GpuExpertLayer& layer_;
  NetworkPath& path_;
  const ExpertParams& params_;
  const bool by_phases_;  ///< the host must know what is sent
  const std::int32_t own_node_;
  ChunkProgram program_;
  // Used only if the host must know what is sent.
  std::unique_ptr<NodeSlices> slices_;
  NetworkPhase phase_;
};

}  // namespace waybill::cuda
