#include "copy_engine.h"

#include <algorithm>

#include "call_params.h"
#include "cuda_check.h"
#include "waybill/core/at.h"

namespace waybill::cuda {

using waybill::detail::at;

namespace {

/// Streams of a device that do not stand behind each other (CUDA_DEVICE_MAX_CONNECTIONS, at most
/// 32), of which every rank has two for other work, one for a leg to other nodes, and two here.
constexpr int most_sharing_two = 32 / 5;

/// A destination's turn: long, as each copy costs a microsecond or two.
constexpr std::size_t turn_bytes = std::size_t{32} << 20;

}  // namespace

CopyEngine::CopyEngine(std::shared_ptr<GpuRank> gpu, int share)
    : gpu_(std::move(gpu)), num_queues_(share <= most_sharing_two ? 2 : 1) {}

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
  total = 0;
}

void CopyEngine::Batch::add(std::byte* destination, const std::byte* source, std::size_t size) {
  to.push_back(destination);
  from.push_back(source);
  bytes.push_back(size);
  total += size;
}

/// Empties the batches and marks the place on the stream.
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
  batches_.resize(at(call.plan->world_size));
  for (Batch& batch : batches_) batch.clear(call.inputs.size());
  auto* const stream = static_cast<cudaStream_t>(call.stream.handle);
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

void CopyEngine::add_rows(const SequenceCall& call, const RowSegment& segment,
                          std::uint64_t place) {
  const auto rank = at(static_cast<std::int64_t>(place >> place_rank_shift));
  const ConstTensorView& input = call.inputs[at(segment.tensor)];
  const std::int64_t row_bytes = call.plan->cuts[at(segment.tensor)].row_bytes;
  const std::int64_t pitch = pitch_of(input);
  const std::byte* const from = input.data + segment.row * pitch;
  std::byte* const to = call.window->peers[rank] + (place & place_offset_mask);
  if (segment.rows > 1 && pitch != row_bytes) {
    const bool local = rank == at(to_int(call.plan->rank));
    gpu_->check(cudaMemcpy2DAsync(to, at(row_bytes), from, at(pitch), at(row_bytes),
                                  at(segment.rows), cudaMemcpyDeviceToDevice, use_queue(local)),
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
    batch.total += bytes;
    return;
  }
  last = std::ssize(batch.to);
  batch.add(to, from, bytes);
}

void CopyEngine::add(const SequenceCall& call, std::span<const RowSegment> segments) {
  for (const RowSegment& segment : segments) {
    for (std::int32_t c = 0; c < segment.num_copies; ++c) {
      add_rows(call, segment, call.plan->segment_places[at(segment.first_copy + c)]);
    }
  }
}

/// The copies to all other ranks in one list, in which each destination is as far as the others:
/// plans are uneven, and a rank to which all send at once would hold up all of them.
void CopyEngine::take_turns(std::size_t me) {
  struct Turn {
    std::size_t rank;
    std::size_t next = 0;  ///< copy
    std::size_t done = 0;  ///< bytes of it
    std::size_t sent = 0;  ///< bytes, of all
  };
  links_.clear(0);
  std::vector<Turn> turns;
  for (std::size_t k = 1; k < batches_.size(); ++k) {
    const std::size_t rank = (me + k) % batches_.size();
    if (batches_[rank].total > 0) turns.push_back({rank});
  }
  const auto share = [&](const Turn& turn) {
    return static_cast<double>(turn.sent) / static_cast<double>(batches_[turn.rank].total);
  };
  while (!turns.empty()) {
    const auto turn = std::ranges::min_element(turns, {}, share);
    const Batch& batch = batches_[turn->rank];
    const std::size_t i = turn->next;
    const std::size_t size = std::min(batch.bytes[i] - turn->done, turn_bytes);
    links_.add(static_cast<std::byte*>(batch.to[i]) + turn->done,
               static_cast<const std::byte*>(batch.from[i]) + turn->done, size);
    turn->sent += size;
    turn->done += size;
    if (turn->done < batch.bytes[i]) continue;
    turn->done = 0;
    if (++turn->next == batch.to.size()) turns.erase(turn);
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
  gpu_->check(cudaStreamIsCapturing(static_cast<cudaStream_t>(call.stream.handle), &status),
              "asking about a capture", "dispatch");
  const bool capturing = status != cudaStreamCaptureStatusNone;
  const std::size_t me = at(to_int(call.plan->rank));
  take_turns(me);
  if (!links_.to.empty()) queue(links_, use_queue(false), capturing);
  if (!batches_[me].to.empty()) queue(batches_[me], use_queue(true), capturing);
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
