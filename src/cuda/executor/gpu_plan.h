#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../kernel/sequence_params.h"
#include "gpu_rank.h"
#include "waybill/runtime/executor.h"

namespace waybill::cuda {

/// Device memory for a plan's tables, and pinned host memory of the same shape to fill it from.
/// Kept for the next plan when one goes: cudaFree would wait for the device, on which another
/// rank's kernel may wait for this rank.
struct PlanBlock {
  std::shared_ptr<void> device;
  std::shared_ptr<void> pinned;
  std::int64_t size_bytes = 0;
  cudaEvent_t uploaded = nullptr;  ///< recorded behind the last copy out of the pinned memory
  cudaEvent_t used = nullptr;      ///< recorded behind the last use of the device memory
};

class PlanPool {
 public:
  explicit PlanPool(std::shared_ptr<GpuRank> gpu) : gpu_(std::move(gpu)) {}
  PlanPool(const PlanPool&) = delete;
  PlanPool& operator=(const PlanPool&) = delete;
  ~PlanPool();

  [[nodiscard]] PlanBlock take(std::int64_t size_bytes);
  void give(PlanBlock block) { free_.push_back(std::move(block)); }

 private:
  std::shared_ptr<GpuRank> gpu_;
  std::vector<PlanBlock> free_;
};

/// A plan's tables on the device: head, chunks, places. Their place does not change when a plan is
/// replaced, so that a captured launch reads the new one.
class GpuPlan final : public UploadedPlan {
 public:
  GpuPlan(std::shared_ptr<PlanPool> pool, std::shared_ptr<GpuRank> gpu, const SequencePlan& plan);
  ~GpuPlan() override;

  /// Queues the copy. @throws InvalidArgument for more chunks or places than there is room for
  void fill(const SequencePlan& plan, cudaStream_t stream);

  /// To be called behind each launch: another plan gets the tables when the stream has come past
  /// it. Without a word while the stream is captured: who replays a graph keeps its plans.
  void note_use(cudaStream_t stream) const;

  void point(SequenceParams& params) const;

 private:
  std::shared_ptr<PlanPool> pool_;
  std::shared_ptr<GpuRank> gpu_;
  std::int64_t max_chunks_;
  std::int64_t max_places_;
  PlanBlock block_;
};

}  // namespace waybill::cuda
