#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../rank/gpu_rank.h"
#include "call_params.h"
#include "experts/expert_executor.h"
#include "node_rows_launch.h"
#include "schedule/workspace_phase.h"
#include "tables.h"

namespace waybill::cuda {

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

  /// Ahead of the route, when all ids are there.
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

}  // namespace waybill::cuda
