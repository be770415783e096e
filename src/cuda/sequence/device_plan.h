#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../network/path_params.h"
#include "../rank/gpu_rank.h"
#include "runtime/executor.h"
#include "params.h"

namespace waybill::cuda {

/// Device memory for a plan's tables, and pinned host memory for those that are uploaded.
/// Kept for the next plan when one goes: cudaFree would wait for the device, on which another
/// rank's kernel may wait for this rank.
struct PlanBlock {
  std::shared_ptr<void> device;
  std::shared_ptr<void> pinned;
  std::int64_t size_bytes = 0;     ///< of the device memory
  std::int64_t upload_bytes = 0;   ///< of the pinned memory
  cudaEvent_t uploaded = nullptr;  ///< recorded behind the last copy out of the pinned memory
  cudaEvent_t used = nullptr;      ///< recorded behind the last use of the device memory
};

/// Plans may go on any thread while one takes.
class PlanPool {
 public:
  explicit PlanPool(std::shared_ptr<GpuRank> gpu) : gpu_(std::move(gpu)) {}
  PlanPool(const PlanPool&) = delete;
  PlanPool& operator=(const PlanPool&) = delete;
  ~PlanPool();

  [[nodiscard]] PlanBlock take(std::int64_t size_bytes, std::int64_t upload_bytes);
  void give(PlanBlock block) noexcept;

 private:
  [[nodiscard]] PlanBlock find(std::int64_t size_bytes, std::int64_t upload_bytes);

  std::shared_ptr<GpuRank> gpu_;
  std::mutex mutex_;
  std::vector<PlanBlock> free_;  ///< with room for all that there are
  std::size_t num_blocks_ = 0;
};

/// Where the tables of a plan lie in its block: what is uploaded (head, segments and their
/// addresses, batches), then what the device makes of it (chunks, addresses).
struct PlanLayout {
  PlanLayout() = default;
  /// With room for as many segments as a plan of the same chunks may have, up to some thousand.
  explicit PlanLayout(const SequencePlan& plan);

  std::int64_t max_segments = 0;
  std::int64_t max_segment_addresses = 0;
  std::int64_t max_chunks = 0;
  std::int64_t max_addresses = 0;
  std::int64_t max_batches = 0;
  std::int64_t max_waits = 0;
  std::int64_t max_signals = 0;
  std::int64_t max_steps = 0;  ///< and counters that they wait for
  std::int64_t max_puts = 0;
  std::int64_t max_step_waits = 0;
  std::int64_t max_step_signals = 0;
  std::int64_t bucket_chunks_at = 0;
  std::int64_t segments_at = 0;
  std::int64_t segment_addresses_at = 0;
  std::int64_t batches_at = 0;
  std::int64_t waits_at = 0;
  std::int64_t signals_at = 0;
  std::int64_t steps_at = 0;  ///< of the NetworkProgram, as are the next ones
  std::int64_t puts_at = 0;
  std::int64_t step_waits_at = 0;
  std::int64_t step_signals_at = 0;
  std::int64_t upload_bytes = 0;
  std::int64_t chunks_at = 0;
  std::int64_t addresses_at = 0;
  std::int64_t chunk_batches_at = 0;
  std::int64_t done_at = 0;
  std::int64_t steps_done_at = 0;
  std::int64_t ready_at = 0;
  std::int64_t size_bytes = 0;
};

/// A plan's tables on the device. Their address does not change when a plan is replaced, so that a
/// captured launch reads the new one.
class GpuPlan final : public UploadedPlan {
 public:
  GpuPlan(std::shared_ptr<PlanPool> pool, std::shared_ptr<GpuRank> gpu, const SequencePlan& plan);
  ~GpuPlan() override;

  /// Queues the copy and the making of chunks.
  /// @throws InvalidArgument for a plan for which there is no room, and nothing has changed then;
  ///   Unsupported for more tensors than kernels take
  void fill(const SequencePlan& plan, cudaStream_t stream);

  /// To be called behind each launch: another plan gets the tables when the stream has come past
  /// it. Without a word while the stream is captured: who replays a graph keeps its plans.
  void note_use(cudaStream_t stream) const;

  /// To be called when copies of the plan's ranges were queued: a graph that holds them replays
  /// them for ever, so that the plan cannot be replaced.
  void note_copies(bool capturing) const { fixed_ = fixed_ || capturing; }

  void point(SequenceParams& params) const;

  /// In device memory: what kernels say of the plan.
  [[nodiscard]] const std::uint64_t* fingerprint() const;

  /// Whether it takes the kernels for batches. A plan without work takes those of the one before,
  /// so that a graph of either can hold the next.
  [[nodiscard]] bool batched() const { return batched_; }
  [[nodiscard]] PathTables path_tables() const;

 private:
  void check_room(const SequencePlan& plan) const;
  void check_network_room(const NetworkProgram& network) const;
  void check_staging(const SequencePlan& plan) const;
  void write_upload(const SequencePlan& plan) const;
  void queue_upload(const SequencePlan& plan, cudaStream_t stream) const;
  template <class T>
  [[nodiscard]] T* table(std::int64_t at) const;

  std::shared_ptr<PlanPool> pool_;
  std::shared_ptr<GpuRank> gpu_;
  PlanLayout layout_;
  PlanBlock block_;
  std::vector<std::int64_t> window_offsets_;  ///< [tensors] of the plan
  std::vector<std::int64_t> window_rows_;
  bool batched_ = false;  ///< as the last plan that had work for the kernels
  mutable bool captured_ = false;
  mutable bool fixed_ = false;
};

}  // namespace waybill::cuda
