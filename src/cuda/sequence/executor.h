#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "../network/network_path.h"
#include "../rank/gpu_rank.h"
#include "kernels.h"
#include "runtime/executor.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// Runs calls with the kernels of this module, on windows that are device memory.
/// @param share ranks on this rank's device; they divide its multiprocessors
/// @param path takes the rows between nodes; null on one node
[[nodiscard]] std::unique_ptr<Executor> make_gpu_executor(Transport& transport,
                                                          std::shared_ptr<GpuRank> gpu, int share,
                                                          std::unique_ptr<NetworkPath> path);

/// Bytes from row to row.
[[nodiscard]] inline std::int64_t pitch_of(const ConstTensorView& view) {
  return view.strides[0] * dtype_bytes(view.dtype);
}

/// Device memory for a plan's tables, and pinned host memory for those that are uploaded.
/// Kept for the next plan when one goes: cudaFree would wait for the device, on which another
/// rank's kernel may wait for this rank.
struct PlanBlock {
  std::shared_ptr<void> device;
  std::shared_ptr<void> pinned;
  std::int64_t size_bytes = 0;     ///< size of the device memory
  std::int64_t upload_bytes = 0;   ///< size of the pinned memory
  cudaEvent_t uploaded = nullptr;  ///< recorded after the last copy out of the pinned memory
  cudaEvent_t used = nullptr;      ///< recorded after the last use of the device memory
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

/// A plan's tables on the device. Their address does not change when a plan is replaced, so that a
/// captured launch reads the new one. There is room for as many segments as a plan of the same
/// chunks may have, up to some thousand, and for twice the batches.
class GpuPlan final : public UploadedPlan {
 public:
  GpuPlan(std::shared_ptr<PlanPool> pool, std::shared_ptr<GpuRank> gpu, const SequencePlan& plan);
  ~GpuPlan() override;

  /// Queues the copy and the making of chunks.
  /// @throws InvalidArgument for a plan for which there is no room, and nothing has changed then;
  ///   Unsupported for more tensors than kernels take
  void fill(const SequencePlan& plan, cudaStream_t stream);

  /// To be called after each launch: another plan gets the tables when the stream has come past
  /// it. A captured launch is only noted: whoever replays a graph keeps its plans.
  void note_use(cudaStream_t stream) const;

  /// To be called when copies of the plan's ranges were queued: a graph that holds them replays
  /// them for ever, so that the plan cannot be replaced.
  void note_copies(bool capturing) const { fixed_ = fixed_ || capturing; }

  void point(SequenceParams& params) const;

  /// In device memory: the words that kernels compare.
  [[nodiscard]] const std::uint64_t* fingerprint() const;

  /// Whether it takes the kernels for batches. A plan without work takes those of the one before,
  /// so that a graph of either can hold the next.
  [[nodiscard]] bool batched() const { return batched_; }
  [[nodiscard]] PathTables path_tables() const;

 private:
  /// The tables in the order of their memory. Those before `chunks` are uploaded, the device makes
  /// the next ones of them, and those from `done` on are counters, 0 between calls.
  enum Table : std::size_t {
    head,
    bucket_chunks,
    segments,
    segment_addresses,
    batches,
    waits,
    signals,
    steps,
    puts,
    step_waits,
    step_signals,
    chunks,
    addresses,
    chunk_batches,
    done,
    steps_done,
    ready,
    num_tables
  };
  template <class Visit>
  static void for_each_table(const SequencePlan& plan, Visit&& visit);

  void check_room(const SequencePlan& plan) const;
  void check_staging(const SequencePlan& plan) const;
  void write_upload(const SequencePlan& plan) const;
  void queue_upload(const SequencePlan& plan, cudaStream_t stream) const;
  template <class T>
  [[nodiscard]] T* table(Table which) const;

  std::shared_ptr<PlanPool> pool_;
  std::shared_ptr<GpuRank> gpu_;
  std::array<std::int64_t, num_tables> at_{};    ///< bytes, in the block
  std::array<std::int64_t, num_tables> room_{};  ///< entries
  PlanBlock block_;
  std::vector<std::int64_t> window_offsets_;  ///< [tensors] of the plan
  std::vector<std::int64_t> window_rows_;
  bool batched_ = false;  ///< as the last plan that had work for the kernels
  mutable bool captured_ = false;
  mutable bool fixed_ = false;
};

/// Sends rows with the copy engines of the device: one queue for the links, one for rows that stay.
/// More queues share the engines, and wait for each other (docs/performance/gpu_sequences.md). Rows
/// that continue others both in the tensor and in the window are one copy with them; destinations
/// alternate.
class CopyEngine {
 public:
  /// @param share ranks on this device: where there are many, one queue does both, as all ranks
  ///   together must not have more than the device, or one rank's kernel, waiting for another's,
  ///   would stand before that one's copies
  CopyEngine(std::shared_ptr<GpuRank> gpu, int share);
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  ~CopyEngine();

  /// Queues the rows of the call, or of the plan's local segments alone, after the work that is on
  /// the stream. Other ranks do not see them before a signal after join().
  void send(const SequenceCall& call, bool local_alone);

  /// kv_gradient: the rows of the plan's local segments, from gradients to outputs. Outputs in
  /// float32 of 16-bit gradients are written by `num_sms` multiprocessors.
  void return_local(const SequenceCall& call, int num_sms);

  /// Lets the stream wait for the copies of the last send.
  void join(const SequenceCall& call);

 private:
  /// Contiguous copies to one rank, and how many of them are queued.
  struct Batch {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> bytes;
    std::vector<std::int64_t> last;  ///< [tensors]: the last copy of the tensor, -1: none yet
    std::size_t total = 0;           ///< bytes
    std::size_t next = 0;            ///< copy that is queued next
    std::size_t done = 0;            ///< bytes of it that are queued
    std::size_t sent = 0;            ///< bytes of all copies that are queued

    void clear(std::size_t num_tensors);
    void add(std::byte* destination, const std::byte* source, std::size_t size);
  };

  struct Queue {
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;
    bool used = false;  ///< by this call
  };

  void begin(const SequenceCall& call);
  void add(const SequenceCall& call, std::span<const RowSegment> segments);
  /// The rows of a segment, on their way to `rank`; pitches are bytes.
  void add_rows(const SequenceCall& call, std::int32_t rank, const RowSegment& segment,
                const std::byte* from, std::int64_t from_pitch, std::byte* to,
                std::int64_t to_pitch);
  void take_until(Batch& batch, std::size_t sent);
  void queue_links(std::size_t me, bool capturing);
  void queue_batches(const SequenceCall& call);
  void queue(const Batch& batch, cudaStream_t stream, bool capturing) const;
  /// The queue of a destination, which begins after the work that was on the stream.
  cudaStream_t use_queue(bool local);

  std::shared_ptr<GpuRank> gpu_;
  std::size_t num_queues_;
  std::vector<Batch> batches_;  ///< [W]
  Batch links_;                 ///< copies to one rank in one round
  Queue queues_[2];             ///< for the links; for rows that stay
  cudaEvent_t begun_ = nullptr;
};

}  // namespace waybill::cuda
