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
