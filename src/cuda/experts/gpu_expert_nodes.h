#pragma once

#include <memory>

#include "../network/network_path.h"
#include "../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "gpu_expert_params.h"
#include "gpu_expert_tables.h"
#include "nodes_params.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// What a layer on several nodes does beside the work of one node: a token goes once to each other
/// node, to the rank of this one's local index, which then does with it as with its own; sums come
/// back the same way. What goes there lies in this rank's part of its own workspace (slice of its
/// own node) first, where the kernels of the node find it as well; the network path of the world's
/// backend puts it to the workspaces of the peers: rows that are wanted there, which the device
/// alone knows; where the host must say what is sent, the whole slice.
class ExpertNodes {
 public:
  /// Of so many multiprocessors, those for a network path that a kernel of the node runs beside.
  [[nodiscard]] static int path_sms(int num_sms);

  ExpertNodes(Transport& transport, std::shared_ptr<GpuRank> gpu, NetworkPath& path,
              const EPConfig& config, const EPDispatchOptions& options, const ExpertMemory& memory,
              const ExpertParams& params);
  ExpertNodes(const ExpertNodes&) = delete;
  ExpertNodes& operator=(const ExpertNodes&) = delete;
  ~ExpertNodes();

  /// Begins a dispatch: synchronizes with all ranks, and exchanges ids, and weights where there are
  /// any.
  void exchange_ids(const ExpertCall& call, const ExpertDispatchInput& input,
                    const GpuExpertRouting& routing, int num_sms);

  /// The same by a routing that is there: no ids.
  void exchange_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                        const GpuExpertRouting& routing, int num_sms);

  /// The table of runs, from that of the ids.
  void note_runs(const ExpertCall& call, GpuExpertRouting& made) const;

  /// Begins to exchange rows, once counting or weights are done, beside the kernel of the node,
  /// which waits for them. Rows that were quantised are in place.
  void start_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                  const GpuExpertRouting& routing, int num_sms);

  /// Behind that kernel, which other kernels may then follow.
  void finish_rows(const ExpertCall& call);

  /// Begins a combine: synchronizes with all ranks, whose expert outputs are then in the combine
  /// windows.
  void arrive(const ExpertCall& call, const GpuExpertRouting& routing, int num_sms);

  /// Where the combine of a node's ranks leaves sums: [nodes, M] rows, by home node.
  [[nodiscard]] std::byte* sums() const {
    return memory_.workspace.local + memory_.workspace_layout.sums;
  }

  /// Begins to send the sums of other nodes' tokens home.
  void start_partial_sums(const ExpertCall& call, const GpuExpertRouting& routing, int num_sms);

  /// Adds this node's sums and those that come.
  void add_partial_sums(const ExpertCall& call, const ExpertCombineInput& input,
                        const GpuExpertRouting& routing);

  /// This rank's part of the workspace: where its payload and scales lie.
  [[nodiscard]] std::byte* own_rows() const;
  [[nodiscard]] std::byte* own_scales() const;

 private:
  [[nodiscard]] ListPutsParams puts(const ExpertCall& call, const GpuExpertRouting& routing,
                                    FaultKind kind, ExpertSignal signal) const;
  [[nodiscard]] ListPutsParams partial_sum_puts(const ExpertCall& call,
                                                const GpuExpertRouting& routing) const;
  void add_part(ListPutsParams& params, std::int64_t part, std::int64_t row_bytes) const;
  void add_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                   ListPutsParams& params) const;
  void start(const ListPutsParams& params, const ExpertCall& call, int num_sms);
  [[nodiscard]] NetworkPhase whole_parts(const ListPutsParams& params) const;
  void wait_until(const ListPutsParams& params, const ExpertCall& call, bool counts);
  void copy(std::byte* to, const ConstTensorView& from, std::int64_t row_bytes,
            const ExpertCall& call) const;
  [[nodiscard]] std::int64_t own_slice() const { return own_node_ * config_.max_tokens; }
  [[nodiscard]] std::int64_t first_slot(ExpertSignal signal) const {
    return static_cast<std::int64_t>(signal) * config_.world_size;
  }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  NetworkPath& path_;
  EPConfig config_;
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  const ExpertParams& params_;
  std::int32_t own_node_;
  std::shared_ptr<void> program_memory_;
  PathProgram program_{};
  unsigned* done_ = nullptr;  ///< of the network path: puts of a step that have arrived
  NetworkPhase phase_;        ///< instead, where the host must say what is sent
};

}  // namespace waybill::cuda
