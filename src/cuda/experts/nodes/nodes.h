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
/// A stretch of the tokens whose sums a rank makes for other nodes, as the network path waits for
/// it.
struct SumPiece {
  std::int64_t first;  ///< token of [nodes, M]
  std::int64_t count;
  std::int32_t ready;  ///< counter that is raised behind it
};

/// Room for the network program of a call, which the device writes, chunk of tokens by chunk; and
/// the slots that others raise when chunks have come.
class ChunkProgram {
 public:
  /// Collective. @param max_row_bytes of what is sent of a token
  ChunkProgram(Transport& transport, std::shared_ptr<GpuRank> gpu, const EPConfig& config,
               std::int64_t max_row_bytes);
  ChunkProgram(const ChunkProgram&) = delete;
  ChunkProgram& operator=(const ChunkProgram&) = delete;
  ~ChunkProgram();

  /// What the kernel that writes it is to know of it.
  void add_to(ListPutsParams& params) const;
  /// Of what the parameters list.
  [[nodiscard]] PathTables tables(const ListPutsParams& params) const;
  [[nodiscard]] PathState* state() const { return program_.state; }

  [[nodiscard]] const SignalPad& pad() const { return pad_; }
  [[nodiscard]] const std::uint64_t* whole_slots() const { return pad_.local; }
  [[nodiscard]] ChunkSlots chunk_slots() const {
    return {pad_.local + config_.num_nodes(), num_chunks_, chunk_shift_};
  }

  /// What is to be summed for other nodes, in the order in which it is sent.
  [[nodiscard]] std::vector<SumPiece> pieces() const;
  [[nodiscard]] std::uint64_t* ready(const SumPiece& piece) const { return ready_ + piece.ready; }

 private:
  [[nodiscard]] std::int64_t others() const { return config_.num_nodes() - 1; }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  EPConfig config_;
  std::int32_t chunk_shift_;
  std::int32_t num_chunks_;        ///< of a node
  std::int32_t ready_pieces_ = 0;  ///< of a node; 0: see ListPutsParams
  std::int64_t piece_tokens_ = 0;
  SignalPad pad_;  ///< [nodes] of what goes whole, then [nodes, num_chunks]
  std::shared_ptr<void> memory_;
  PathProgram program_{};
  unsigned* done_ = nullptr;        ///< of the network path: puts of a step that have arrived
  std::uint64_t* ready_ = nullptr;  ///< partial sums that are made
};

/// Rows of one phase between nodes, where the host must say what is sent (NCCL), and knows how many
/// rows each node needs: they are packed, sent, and unpacked. No memory of its own: in a dispatch
/// the arrays of sums are free, in a combine the sender's is once it is packed.
class NodeSlices {
 public:
  /// What a phase is to be.
  struct Phase {
    NodeRows rows;
    std::vector<WorkspacePart> parts;
    std::function<void(cudaStream_t)> unpack;
  };

  NodeSlices(std::shared_ptr<GpuRank> gpu, int share, const EPConfig& config,
             const EPDispatchOptions& options, const ExpertMemory& memory,
             const ExpertParams& params);

  /// Whether hosts know the counts: all of them have waited for those of a layer whose windows
  /// grow. The same on all ranks.
  [[nodiscard]] static bool are_known(const ExpertCall& call) { return call.may_grow; }
  /// Whether the rows of a dispatch find room while they are packed.
  [[nodiscard]] bool fit() const;

  /// EarlyWork of the route, when all ids are there.
  void count(const ExpertCall& call, GpuExpertRouting& made) const;

  /// Packs this rank's slice of tokens and scales, as they lie in the workspace.
  [[nodiscard]] Phase pack_tokens(const ExpertCall& call, const GpuExpertRouting& routing,
                                  int path_sms) const;
  /// Packs the sums for other nodes.
  [[nodiscard]] Phase pack_sums(const ExpertCall& call, const GpuExpertRouting& routing,
                                int path_sms) const;

 private:
  enum class Way : std::uint8_t { there, back };  ///< which rows: see NodeRowsParams

  [[nodiscard]] MoveNodeRowsParams rows_of(const GpuExpertRouting& routing, Way way) const;
  [[nodiscard]] int pack_blocks() const;
  void move(const MoveNodeRowsParams& params, int blocks, cudaStream_t stream,
            const char* operation) const;

  std::shared_ptr<GpuRank> gpu_;
  int share_;
  EPConfig config_;
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  const ExpertParams& params_;
  std::int64_t sum_bytes_;    ///< of a row
  std::int64_t token_bytes_;  ///< that travel
  std::int64_t scale_bytes_;  ///< with it
};

/// What a layer on several nodes does beside the work of one node: a token goes once to each other
/// node, to the rank of this one's local index, which then does with it as with its own; sums come
/// back the same way. One network path, started as a call begins, carries all that the call sends,
/// chunk by chunk; where the host must say what is sent, there is one for each step of the call:
/// with the rows that a node needs, if hosts know the counts, else with whole slices.
class ExpertNodes {
 public:
  /// Of so many multiprocessors, those for a network path that a kernel of the node runs beside.
  [[nodiscard]] static int path_sms(int num_sms);
  /// The others.
  [[nodiscard]] static int kernel_sms(int num_sms);

  ExpertNodes(Transport& transport, std::shared_ptr<GpuRank> gpu, int share, NetworkPath& path,
              const EPConfig& config, const EPDispatchOptions& options, const ExpertMemory& memory,
              const ExpertParams& params);
  ExpertNodes(const ExpertNodes&) = delete;
  ExpertNodes& operator=(const ExpertNodes&) = delete;
  ~ExpertNodes() = default;

  /// Begins a dispatch: synchronizes with all ranks, and exchanges weights where there are any, and
  /// ids if it counts (else the routing is there). Rows follow by themselves, where the device says
  /// what is sent. Rows that were quantised are in place.
  void begin_dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                      const GpuExpertRouting& routing, bool counts, int num_sms);

  /// EarlyWork of the route, once a dispatch that counts has begun.
  void count_rows(const ExpertCall& call, GpuExpertRouting& made) const;

  /// The table of runs, from that of the ids.
  void note_runs(const ExpertCall& call, GpuExpertRouting& made) const;

  /// EarlyWork of the kernel of the node: begins to exchange rows, where they do not come by
  /// themselves, and says where it finds them.
  void start_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                  const GpuExpertRouting& routing, int num_sms, RowsParams& rows);

  /// Behind that kernel, which other kernels may then follow.
  void finish_rows(const ExpertCall& call);

  /// Begins a combine: expert outputs of the ranks of the node are in the combine windows behind
  /// it.
  void begin_combine(const ExpertCall& call, const GpuExpertRouting& routing, int num_sms);

  /// Where the combine of a node's ranks leaves sums: [nodes, M] rows, by home node.
  [[nodiscard]] std::byte* sums() const {
    return memory_.workspace.local + memory_.workspace_layout.sums;
  }

  /// What is to be summed for other nodes, in the order in which it is sent. Behind each:
  /// finish_piece().
  [[nodiscard]] std::vector<SumPiece> pieces() const { return program_.pieces(); }
  void finish_piece(const ExpertCall& call, const SumPiece& piece);

  /// Behind all pieces, ahead of this node's own sums.
  void finish_pieces(const ExpertCall& call, const GpuExpertRouting& routing, int num_sms);

  /// Adds this node's sums and those that come.
  void add_partial_sums(const ExpertCall& call, const ExpertCombineInput& input,
                        const GpuExpertRouting& routing, int num_sms);

  /// This rank's part of the workspace: where its payload and scales lie.
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
  [[nodiscard]] std::int64_t own_slice() const { return own_node_ * config_.max_tokens; }
  [[nodiscard]] std::int32_t local_rank() const { return config_.rank % config_.local_world_size; }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  int share_;
  NetworkPath& path_;
  EPConfig config_;
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  const ExpertParams& params_;
  const bool by_phases_;  ///< the host must say what is sent
  const std::int32_t own_node_;
  ChunkProgram program_;
  // Instead, where the host must say what is sent:
  std::unique_ptr<NodeSlices> slices_;
  NetworkPhase phase_;
};

}  // namespace waybill::cuda
