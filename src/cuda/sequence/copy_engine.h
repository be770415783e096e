#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <vector>

#include "../rank/gpu_rank.h"
#include "runtime/executor.h"

namespace waybill::cuda {

/// Sends rows with the copy engines of the device: one queue for the links, one for what stays.
/// More queues share the engines, and wait for each other (docs/performance/gpu_sequences.md). What
/// continues both in the tensor and in the window is one copy; destinations alternate.
class CopyEngine {
 public:
  /// @param share ranks on this device: where there are many, one queue does both, as all ranks
  ///   together must not have more than the device, or one rank's kernel, waiting for another's,
  ///   would stand before that one's copies
  CopyEngine(std::shared_ptr<GpuRank> gpu, int share);
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  ~CopyEngine();

  /// Queues all rows of the call behind what is on the stream. They are not seen by other ranks
  /// before a signal behind join().
  void send_all(const SequenceCall& call);

  /// The same for the plan's local segments alone.
  void send_local(const SequenceCall& call);

  /// kv_gradient: the rows of the plan's local segments, from gradients to outputs. Outputs in
  /// float32 of 16-bit gradients are written by `num_sms` multiprocessors.
  void return_local(const SequenceCall& call, int num_sms);

  /// Lets the stream wait for the copies of the last send.
  void join(const SequenceCall& call);

 private:
  /// Contiguous copies.
  struct Batch {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> bytes;
    std::vector<std::int64_t> last;  ///< [tensors]: of the tensor, -1: none yet
    std::size_t total = 0;           ///< bytes

    void clear(std::size_t num_tensors);
    void add(std::byte* destination, const std::byte* source, std::size_t size);
  };

  /// How far the copies to one rank are.
  struct Turn {
    std::size_t next = 0;  ///< copy
    std::size_t done = 0;  ///< bytes of it
    std::size_t sent = 0;  ///< bytes, of all
  };

  struct Queue {
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;
    bool used = false;  ///< by this call
  };

  void begin(const SequenceCall& call);
  void add(const SequenceCall& call, std::span<const RowSegment> segments);
  /// Rows on their way to a rank.
  struct Rows {
    std::size_t rank;
    std::int32_t tensor;
    const std::byte* from;
    std::byte* to;
    std::int64_t from_pitch;  ///< bytes
    std::int64_t to_pitch;
    std::int64_t rows;
    std::int64_t row_bytes;
  };
  void add_rows(const SequenceCall& call, const RowSegment& segment, std::uint64_t address);
  void add_rows(const SequenceCall& call, const Rows& rows);
  void take_until(Turn& turn, const Batch& batch, std::size_t sent);
  void queue_links(std::size_t me, bool capturing);
  void queue_batches(const SequenceCall& call);
  void queue(const Batch& batch, cudaStream_t stream, bool capturing) const;
  /// The queue of a destination, behind what was on the stream.
  cudaStream_t use_queue(bool local);

  std::shared_ptr<GpuRank> gpu_;
  std::size_t num_queues_;
  std::vector<Batch> batches_;  ///< [W]
  Batch links_;                 ///< of one rank's round
  Queue queues_[2];             ///< for the links; for what stays
  cudaEvent_t begun_ = nullptr;
};

}  // namespace waybill::cuda
