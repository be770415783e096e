#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <vector>

#include "gpu_rank.h"
#include "waybill/runtime/executor.h"

namespace waybill::cuda {

/// Sends rows with the copy engines of the device, one queue a destination. What continues both in
/// the tensor and in the window is one copy; the copies of a queue are handed over as one batch.
class CopyEngine {
 public:
  explicit CopyEngine(std::shared_ptr<GpuRank> gpu) : gpu_(std::move(gpu)) {}
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  ~CopyEngine();

  /// Queues all rows of the call behind what is on the stream. They are not seen by other ranks
  /// before a signal behind join().
  void send_all(const SequenceCall& call);

  /// The same for the plan's local segments alone.
  void send_local(const SequenceCall& call);

  /// Lets the stream wait for the copies of the last send.
  void join(const SequenceCall& call);

 private:
  /// The contiguous copies to one rank.
  struct Batch {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> bytes;
    std::vector<std::int64_t> last;  ///< [tensors]: of the tensor, -1: none yet
    bool used = false;
  };

  void begin(const SequenceCall& call);
  void add(const SequenceCall& call, std::span<const RowSegment> segments);
  void add_rows(const SequenceCall& call, const RowSegment& segment, std::uint64_t place);
  void queue_batches(const SequenceCall& call);
  void queue(const Batch& batch, cudaStream_t stream, bool capturing) const;
  void use_queue(std::size_t rank);

  std::shared_ptr<GpuRank> gpu_;
  std::vector<Batch> batches_;        ///< [W]
  std::vector<cudaStream_t> queues_;  ///< [W]
  std::vector<cudaEvent_t> done_;     ///< [W]
  cudaEvent_t begun_ = nullptr;
};

}  // namespace waybill::cuda
