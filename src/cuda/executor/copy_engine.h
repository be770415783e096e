#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "gpu_rank.h"
#include "waybill/runtime/executor.h"

namespace waybill::cuda {

/// Sends rows with the copy engines of the device, one queue a destination.
class CopyEngine {
 public:
  explicit CopyEngine(std::shared_ptr<GpuRank> gpu) : gpu_(std::move(gpu)) {}
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  ~CopyEngine();

  /// Queues the copies behind what is on the stream, and lets the stream wait for them. They are
  /// not seen by other ranks before a later signal.
  void send(const SequenceCall& call);

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::int64_t bytes;  ///< of a row
    std::int64_t rows;
    std::int64_t pitch;  ///< of the source
  };

  void make_queues(std::int32_t world_size);
  [[nodiscard]] std::vector<std::vector<Copy>> copies_of(const SequenceCall& call) const;
  void queue(const Copy& copy, cudaStream_t stream) const;

  std::shared_ptr<GpuRank> gpu_;
  std::vector<cudaStream_t> queues_;  ///< [W]
  std::vector<cudaEvent_t> done_;     ///< [W]
  cudaEvent_t begun_ = nullptr;
};

}  // namespace waybill::cuda
