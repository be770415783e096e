#include <algorithm>

#include "../rank/gpu_rank.h"
#include "core/to_size.h"
#include "executor.h"

namespace waybill::cuda {

namespace {

/// A device has streams that do not wait for each other (CUDA_DEVICE_MAX_CONNECTIONS, at most 32).
/// Every rank has two for other work, one for a network path to other nodes, and two here.
constexpr int max_sharing_two = 32 / 5;

/// The bytes that all destinations of a round get together: about 64 MiB each of 7 and 192 MiB each
/// of 3 were the best that were tried (docs/performance/gpu_sequences.md).
constexpr std::size_t round_bytes = std::size_t{512} << 20;

}  // namespace

CopyEngine::CopyEngine(std::shared_ptr<GpuRank> gpu, int share)
    : gpu_(std::move(gpu)), num_queues_(share <= max_sharing_two ? 2 : 1) {}

CopyEngine::~CopyEngine() {
  for (const Queue& queue : queues_) {
    if (queue.stream != nullptr) (void)cudaStreamDestroy(queue.stream);
    if (queue.done != nullptr) (void)cudaEventDestroy(queue.done);
  }
  if (begun_ != nullptr) (void)cudaEventDestroy(begun_);
}

void CopyEngine::Batch::clear(std::size_t num_tensors) {
  to.clear();
  from.clear();
  bytes.clear();
  last.assign(num_tensors, -1);
  total = next = done = sent = 0;
}

void CopyEngine::Batch::add(std::byte* destination, const std::byte* source, std::size_t size) {
  to.push_back(destination);
  from.push_back(source);
  bytes.push_back(size);
  total += size;
}

/// Empties the batches and marks the address on the stream.
void CopyEngine::begin(const SequenceCall& call) {
  const auto new_event = [&](cudaEvent_t& event) {
    gpu_->check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event",
                "dispatch");
  };
  if (begun_ == nullptr) {
    new_event(begun_);
    for (std::size_t q = 0; q < num_queues_; ++q) {
      gpu_->check(cudaStreamCreateWithFlags(&queues_[q].stream, cudaStreamNonBlocking),
                  "making a stream", "dispatch");
      new_event(queues_[q].done);
    }
  }
  for (Queue& queue : queues_) queue.used = false;
  batches_.resize(call.plan->world_size);
  for (Batch& batch : batches_) batch.clear(call.inputs.size());
  const cudaStream_t stream = stream_of(call.stream);
  gpu_->check(cudaEventRecord(begun_, stream), "recording an event", "dispatch");
}

cudaStream_t CopyEngine::use_queue(bool local) {
  Queue& queue = queues_[local ? num_queues_ - 1 : 0];
  if (!queue.used) {
    queue.used = true;
    gpu_->check(cudaStreamWaitEvent(queue.stream, begun_, 0), "ordering streams", "dispatch");
  }
  return queue.stream;
}

void CopyEngine::add_rows(const SequenceCall& call, std::int32_t rank, const RowSegment& segment,
                          const std::byte* from, std::int64_t from_pitch, std::byte* to,
                          std::int64_t to_pitch) {
  const std::int64_t row_bytes = call.plan->cuts[segment.tensor].row_bytes;
  if (segment.rows > 1 && (from_pitch != row_bytes || to_pitch != row_bytes)) {
    const bool local = rank == to_int(call.plan->rank);
    gpu_->check(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, row_bytes, segment.rows,
                                  cudaMemcpyDeviceToDevice, use_queue(local)),
                "copying rows", call.operation);
    return;
  }
  const std::size_t bytes = segment.rows * row_bytes;
  Batch& batch = batches_[rank];
  std::int64_t& last = batch.last[segment.tensor];
  if (last >= 0 && static_cast<const std::byte*>(batch.from[last]) + batch.bytes[last] == from &&
      static_cast<std::byte*>(batch.to[last]) + batch.bytes[last] == to) {
    batch.bytes[last] += bytes;
    batch.total += bytes;
    return;
  }
  last = std::ssize(batch.to);
  batch.add(to, from, bytes);
}

void CopyEngine::add(const SequenceCall& call, std::span<const RowSegment> segments) {
  for (const RowSegment& segment : segments) {
    const ConstTensorView& input = call.inputs[segment.tensor];
    const std::int64_t pitch = pitch_of(input);
    for (std::int32_t c = 0; c < segment.num_destinations; ++c) {
      const std::uint64_t address = call.plan->segment_addresses[segment.first_destination + c];
      const auto rank = static_cast<std::int32_t>(address >> address_rank_shift);
      add_rows(call, rank, segment, input.data + segment.row * pitch, pitch,
               call.window->peers[rank] + (address & address_offset_mask),
               call.plan->cuts[segment.tensor].row_bytes);
    }
  }
}

/// Takes from the copies to a rank that are left until `sent` bytes of it are out.
void CopyEngine::take_until(Batch& batch, std::size_t sent) {
  links_.clear(0);
  while (batch.sent < sent) {
    const std::size_t size = std::min(batch.bytes[batch.next] - batch.done, sent - batch.sent);
    links_.add(static_cast<std::byte*>(batch.to[batch.next]) + batch.done,
               static_cast<const std::byte*>(batch.from[batch.next]) + batch.done, size);
    batch.sent += size;
    batch.done += size;
    if (batch.done < batch.bytes[batch.next]) continue;
    batch.done = 0;
    ++batch.next;
  }
}

/// One destination at a time, from the next rank on, so that all ranks send to different ones. In
/// several rounds where much goes to one: plans are uneven, and a rank to which all send at once
/// would hold up all of them.
void CopyEngine::queue_links(std::size_t me, bool capturing) {
  const std::size_t world = batches_.size();
  std::size_t max_bytes = 0;
  for (std::size_t k = 1; k < world; ++k)
    max_bytes = std::max(max_bytes, batches_[(me + k) % world].total);
  const std::size_t rounds = std::max<std::size_t>(1, max_bytes * (world - 1) / round_bytes);
  for (std::size_t round = 1; round <= rounds; ++round) {
    for (std::size_t k = 1; k < world; ++k) {
      const std::size_t rank = (me + k) % world;
      const std::size_t all = batches_[rank].total;
      const std::size_t share = round == rounds ? all : all / rounds * round / 4096 * 4096;
      take_until(batches_[rank], share);
      if (!links_.to.empty()) queue(links_, use_queue(false), capturing);
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

void CopyEngine::queue_batches(const SequenceCall& call) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  gpu_->check(cudaStreamIsCapturing(stream_of(call.stream), &status), "asking about a capture",
              "dispatch");
  const bool capturing = status != cudaStreamCaptureStatusNone;
  const std::size_t me = to_int(call.plan->rank);
  queue_links(me, capturing);
  if (!batches_[me].to.empty()) queue(batches_[me], use_queue(true), capturing);
  for (const Queue& queue : queues_) {
    if (!queue.used) continue;
    gpu_->check(cudaEventRecord(queue.done, queue.stream), "recording an event", "dispatch");
  }
}

void CopyEngine::send(const SequenceCall& call, bool local_alone) {
  begin(call);
  if (!local_alone) add(call, call.plan->segments);
  add(call, call.plan->local_segments);
  queue_batches(call);
}

void CopyEngine::return_local(const SequenceCall& call, int num_sms) {
  begin(call);
  for (const RowSegment& segment : call.plan->local_segments) {
    const std::size_t t = segment.tensor;
    const ConstTensorView& gradients = call.inputs[t];
    const TensorView& sums = call.outputs[t];
    const std::int64_t from_pitch = pitch_of(gradients);
    const std::int64_t to_pitch = pitch_of(sums);
    const auto address = static_cast<std::int64_t>(
        call.plan->segment_addresses[segment.first_destination] & address_offset_mask);
    const std::int64_t row_bytes = call.plan->cuts[t].row_bytes;
    const std::int64_t window_row = (address - call.plan->window_offsets[t]) / row_bytes;
    const std::byte* const from = gradients.data + window_row * from_pitch;
    std::byte* const to = sums.data + segment.row * to_pitch;
    if (gradients.dtype == sums.dtype) {
      add_rows(call, to_int(call.plan->rank), segment, from, from_pitch, to, to_pitch);
      continue;
    }
    const WidenParams params{.from = from,
                             .to = to,
                             .from_pitch = from_pitch,
                             .to_pitch = to_pitch,
                             .rows = segment.rows,
                             .elements = call.plan->tensors[t].hidden};
    gpu_->check(launch_widen_rows(params, gradients.dtype, num_sms, use_queue(true)),
                "launching a kernel", call.operation);
  }
  queue_batches(call);
}

void CopyEngine::join(const SequenceCall& call) {
  const cudaStream_t stream = stream_of(call.stream);
  for (const Queue& queue : queues_) {
    if (!queue.used) continue;
    gpu_->check(cudaStreamWaitEvent(stream, queue.done, 0), "ordering streams", "dispatch");
  }
}

}  // namespace waybill::cuda
