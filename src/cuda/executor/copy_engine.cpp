#include "copy_engine.h"

#include <algorithm>

#include "call_params.h"
#include "cuda_check.h"
#include "waybill/core/at.h"

namespace waybill::cuda {

using waybill::detail::at;

namespace {

/// Streams of a device that do not stand behind each other (CUDA_DEVICE_MAX_CONNECTIONS, at most
/// 32), of which every rank needs some for other work.
constexpr int device_queues = 32;
constexpr int other_queues_a_rank = 2;
constexpr int most_queues = 2;

}  // namespace

CopyEngine::CopyEngine(std::shared_ptr<GpuRank> gpu, int share)
    : gpu_(std::move(gpu)),
      max_queues_(std::clamp(device_queues / share - other_queues_a_rank, 1, most_queues)) {}

CopyEngine::~CopyEngine() {
  for (const Queue& queue : queues_) {
    if (queue.stream != nullptr) (void)cudaStreamDestroy(queue.stream);
    if (queue.done != nullptr) (void)cudaEventDestroy(queue.done);
  }
  if (begun_ != nullptr) (void)cudaEventDestroy(begun_);
}

/// Empties the batches and marks the place on the stream.
void CopyEngine::begin(const SequenceCall& call) {
  const auto new_event = [&](cudaEvent_t& event) {
    gpu_->check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event",
                "dispatch");
  };
  if (begun_ == nullptr) new_event(begun_);
  while (std::ssize(queues_) < std::min(max_queues_, call.plan->world_size)) {
    Queue& queue = queues_.emplace_back();
    gpu_->check(cudaStreamCreateWithFlags(&queue.stream, cudaStreamNonBlocking), "making a stream",
                "dispatch");
    new_event(queue.done);
  }
  for (Queue& queue : queues_) queue.used = false;
  batches_.resize(at(call.plan->world_size));
  for (Batch& batch : batches_) {
    batch.to.clear();
    batch.from.clear();
    batch.bytes.clear();
    batch.last.assign(call.inputs.size(), -1);
  }
  auto* const stream = static_cast<cudaStream_t>(call.stream.handle);
  gpu_->check(cudaEventRecord(begun_, stream), "recording an event", "dispatch");
}

CopyEngine::Queue& CopyEngine::use_queue(const SequenceCall& call, std::size_t rank) {
  const std::size_t me = at(to_int(call.plan->rank));
  const std::size_t last = queues_.size() - 1;
  const std::size_t distance = (rank + batches_.size() - me - 1) % batches_.size();
  Queue& queue = queues_[rank == me || last == 0 ? last : distance % last];
  if (queue.used) return queue;
  queue.used = true;
  gpu_->check(cudaStreamWaitEvent(queue.stream, begun_, 0), "ordering streams", "dispatch");
  return queue;
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
    gpu_->check(
        cudaMemcpy2DAsync(to, at(row_bytes), from, at(pitch), at(row_bytes), at(segment.rows),
                          cudaMemcpyDeviceToDevice, use_queue(call, rank).stream),
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
    if (batches_[r].to.empty()) continue;
    queue(batches_[r], use_queue(call, r).stream, status != cudaStreamCaptureStatusNone);
  }
  for (const Queue& queue : queues_) {
    if (!queue.used) continue;
    gpu_->check(cudaEventRecord(queue.done, queue.stream), "recording an event", "dispatch");
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
  for (const Queue& queue : queues_) {
    if (!queue.used) continue;
    gpu_->check(cudaStreamWaitEvent(stream, queue.done, 0), "ordering streams", "dispatch");
  }
}

}  // namespace waybill::cuda
