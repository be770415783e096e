#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <vector>

#include "gpu_rank.h"
#include "waybill/runtime/executor.h"

namespace waybill::cuda {

/// Sends rows with the copy engines of the device, over a few queues. What continues both in the
/// tensor and in the window is one copy; the copies to a rank are handed over as one batch.
class CopyEngine {
 public:
  /// @param share ranks on this device: together they must not have more queues than the device, or
  ///   one rank's kernel, waiting for another's, would stand before that one's copies
  CopyEngine(std::shared_ptr<GpuRank> gpu, int share);
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
  };

  struct Queue {
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;
    bool used = false;  ///< by this call
  };

  void begin(const SequenceCall& call);
  void add(const SequenceCall& call, std::span<const RowSegment> segments);
  void add_rows(const SequenceCall& call, const RowSegment& segment, std::uint64_t place);
  void queue_batches(const SequenceCall& call);
  void queue(const Batch& batch, cudaStream_t stream, bool capturing) const;
  /// The queue of a destination, behind what was on the stream.
  Queue& use_queue(const SequenceCall& call, std::size_t rank);

  std::shared_ptr<GpuRank> gpu_;
  int max_queues_;
  std::vector<Batch> batches_;  ///< [W]
  std::vector<Queue> queues_;   ///< the last one is for rows that stay
  cudaEvent_t begun_ = nullptr;
};

}  // namespace waybill::cuda
