#pragma once

#include <memory>
#include <span>
#include <vector>

#include "../../network/network_path.h"
#include "../../rank/gpu_rank.h"
#include "../call_params.h"
#include "../chunk_program.h"
#include "../node_slices.h"
#include "../tables.h"
#include "experts/expert_executor.h"
#include "transport/transport.h"

namespace waybill::cuda {

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

  /// Ahead of the route, once a dispatch that counts has begun.
  void count_rows(const ExpertCall& call, GpuExpertRouting& made) const;

  /// The table of runs, from that of the ids.
  void note_runs(const ExpertCall& call, GpuExpertRouting& made) const;

  /// Ahead of the kernel of the node: begins to exchange rows, where they do not come by
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
