#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "rule.h"
#include "waybill/planner/expert_balance.h"

namespace waybill::cuda {

/// EvenExpertsPlanner on the device: one block plans the copies of a microbatch, the same result
/// bit for bit. All its memory is taken when it is made; a call is one kernel and waits for
/// nothing.
class GpuEvenExperts {
 public:
  static constexpr std::int32_t max_ranks = 128;

  /// Memory of the current device, cleared on `stream`.
  /// @throws InvalidArgument as EvenExpertsPlanner; Unsupported for more ranks, for more than
  ///   max_even_nodes, or for more experts and slots than shared memory holds
  GpuEvenExperts(std::int32_t num_ranks, std::int32_t num_experts,
                 const EvenExpertsOptions& options, cudaStream_t stream);

  /// Queues the plan of `rows`, device memory, int32 [R, E], all together fewer than 2^31 - 1. The
  /// tables are written; the next call writes them again.
  void plan(const std::int32_t* rows, cudaStream_t stream) const;

  /// The same with other present copies: device memory, `spare_experts` numbers each `stride`, such
  /// as tables().slots + experts per rank of another planner with stride slots_per_rank().
  void plan(const std::int32_t* rows, const std::int32_t* present, std::int64_t stride,
            cudaStream_t stream) const;

  /// Device memory, int32: what EvenExperts has.
  [[nodiscard]] const EvenExpertsParams& tables() const { return params_; }
  [[nodiscard]] std::int32_t slots_per_rank() const { return params_.homes + params_.spare; }

  /// For measurements: warps that try limits and ways at once, as many as shared memory holds. At
  /// least one warp is left, for the bound.
  void set_pass_warps(std::int32_t warps);

  /// The plan after all that is on the stream. @throws InvalidArgument for wrong rows or present
  /// copies, as EvenExpertsPlanner::plan
  [[nodiscard]] EvenExperts read(cudaStream_t stream) const;

 private:
  void allocate(const EvenExpertsOptions& options, cudaStream_t stream);
  void launch(const EvenExpertsParams& params, cudaStream_t stream) const;

  EvenExpertsParams params_;
  std::shared_ptr<void> memory_;
};

/// Threads of the block: each may have 128 registers.
inline constexpr int even_experts_threads = 512;

/// Lets kernels have so much shared memory at most; called before the first launch.
[[nodiscard]] cudaError_t prepare_even_experts(int shared_bytes);
[[nodiscard]] cudaError_t launch_even_experts(const EvenExpertsParams& params, int shared_bytes,
                                              cudaStream_t stream);

}  // namespace waybill::cuda
