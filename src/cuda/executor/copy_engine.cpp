#include "copy_engine.h"

#include <algorithm>

#include "call_params.h"
#include "cuda_check.h"
#include "waybill/core/at.h"

namespace waybill::cuda {

using waybill::detail::at;

CopyEngine::~CopyEngine() {
  for (cudaStream_t queue : queues_) (void)cudaStreamDestroy(queue);
  for (cudaEvent_t event : done_) (void)cudaEventDestroy(event);
  if (begun_ != nullptr) (void)cudaEventDestroy(begun_);
}

/// Empties the batches and marks the place on the stream.
void CopyEngine::begin(const SequenceCall& call) {
  const auto new_event = [&](cudaEvent_t& event) {
    gpu_->check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event",
                "dispatch");
  };
  if (begun_ == nullptr) new_event(begun_);
  while (std::ssize(queues_) < call.plan->world_size) {
    gpu_->check(cudaStreamCreateWithFlags(&queues_.emplace_back(), cudaStreamNonBlocking),
                "making a stream", "dispatch");
    new_event(done_.emplace_back());
  }
  batches_.resize(at(call.plan->world_size));
  for (Batch& batch : batches_) {
    batch.to.clear();
    batch.from.clear();
    batch.bytes.clear();
    batch.last.assign(call.inputs.size(), -1);
    batch.used = false;
  }
  auto* const stream = static_cast<cudaStream_t>(call.stream.handle);
  gpu_->check(cudaEventRecord(begun_, stream), "recording an event", "dispatch");
}

void CopyEngine::use_queue(std::size_t rank) {
  if (batches_[rank].used) return;
  batches_[rank].used = true;
  gpu_->check(cudaStreamWaitEvent(queues_[rank], begun_, 0), "ordering streams", "dispatch");
}

void CopyEngine::add_rows(const SequenceCall& call, const RowSegment& segment,
                          std::uint64_t place) {
  const auto rank = at(static_cast<std::int64_t>(place >> place_rank_shift));
  const ConstTensorView& input = call.inputs[at(segment.tensor)];
  const std::int64_t row_bytes = call.plan->cuts[at(segment.tensor)].row_bytes;
  const std::int64_t pitch = pitch_of(input);
  const std::byte* const from = input.data + segment.row * pitch;
  std::byte* const to = call.window->peers[rank] + (place & place_offset_mask);
  if (segment.rows > 1 && pitch != row_bytes) {
    use_queue(rank);
    gpu_->check(cudaMemcpy2DAsync(to, at(row_bytes), from, at(pitch), at(row_bytes),
                                  at(segment.rows), cudaMemcpyDeviceToDevice, queues_[rank]),
                "copying rows", "dispatch");
    return;
  }
  const std::size_t bytes = at(segment.rows * row_bytes);
  Batch& batch = batches_[rank];
  std::int64_t& last = batch.last[at(segment.tensor)];
  if (last >= 0 &&
      static_cast<const std::byte*>(batch.from[at(last)]) + batch.bytes[at(last)] == from &&
      static_cast<std::byte*>(batch.to[at(last)]) + batch.bytes[at(last)] == to) {
    batch.bytes[at(last)] += bytes;
    return;
  }
  last = std::ssize(batch.to);
  batch.to.push_back(to);
  batch.from.push_back(from);
  batch.bytes.push_back(bytes);
}

void CopyEngine::add(const SequenceCall& call, std::span<const RowSegment> segments) {
  for (const RowSegment& segment : segments) {
    for (std::int32_t c = 0; c < segment.num_copies; ++c) {
      add_rows(call, segment, call.plan->segment_places[at(segment.first_copy + c)]);
    }
  }
}

void CopyEngine::queue(const Batch& batch, cudaStream_t stream, bool capturing) const {
  const std::size_t count = batch.to.size();
  if (count == 1 || capturing) {  // a batch cannot be captured
    for (std::size_t i = 0; i < count; ++i) {
      gpu_->check(cudaMemcpyAsync(batch.to[i], batch.from[i], batch.bytes[i],
                                  cudaMemcpyDeviceToDevice, stream),
                  "copying rows", "dispatch");
    }
    return;
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t first = 0;
  gpu_->check(cudaMemcpyBatchAsync(batch.to.data(), batch.from.data(), batch.bytes.data(), count,
                                   &attributes, &first, 1, stream),
              "copying rows", "dispatch");
}

/// From the next rank on, this one last.
void CopyEngine::queue_batches(const SequenceCall& call) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  gpu_->check(cudaStreamIsCapturing(static_cast<cudaStream_t>(call.stream.handle), &status),
              "asking about a capture", "dispatch");
  const std::int32_t world = call.plan->world_size;
  for (std::int32_t k = 1; k <= world; ++k) {
    const auto r = at((to_int(call.plan->rank) + k) % world);
    if (!batches_[r].to.empty()) {
      use_queue(r);
      queue(batches_[r], queues_[r], status != cudaStreamCaptureStatusNone);
    }
    if (!batches_[r].used) continue;
    gpu_->check(cudaEventRecord(done_[r], queues_[r]), "recording an event", "dispatch");
  }
}

void CopyEngine::send_all(const SequenceCall& call) {
  begin(call);
  add(call, call.plan->segments);
  add(call, call.plan->local_segments);
  queue_batches(call);
}

void CopyEngine::send_local(const SequenceCall& call) {
  begin(call);
  add(call, call.plan->local_segments);
  queue_batches(call);
}

void CopyEngine::join(const SequenceCall& call) {
  auto* const stream = static_cast<cudaStream_t>(call.stream.handle);
  for (std::size_t r = 0; r < batches_.size(); ++r) {
    if (!batches_[r].used) continue;
    gpu_->check(cudaStreamWaitEvent(stream, done_[r], 0), "ordering streams", "dispatch");
  }
}

}  // namespace waybill::cuda
