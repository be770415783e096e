#include "gpu_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cuda_check.h"
#include "waybill/core/at.h"

namespace waybill::cuda {
namespace {

using waybill::detail::at;

constexpr std::int64_t head_bytes = 64;
constexpr auto chunk_size = static_cast<std::int64_t>(sizeof(RowChunk));
constexpr auto place_size = static_cast<std::int64_t>(sizeof(std::uint64_t));

std::int64_t table_bytes(std::int64_t chunks, std::int64_t places) {
  return head_bytes + chunks * chunk_size + places * place_size;
}

}  // namespace

PlanPool::~PlanPool() {
  for (const PlanBlock& block : free_) {
    (void)cudaEventDestroy(block.uploaded);
    (void)cudaEventDestroy(block.used);
  }
}

PlanBlock PlanPool::take(std::int64_t size_bytes) {
  const auto found = std::ranges::find_if(
      free_, [&](const PlanBlock& block) { return block.size_bytes >= size_bytes; });
  if (found != free_.end()) {
    PlanBlock block = std::move(*found);
    free_.erase(found);
    return block;
  }
  PlanBlock block;
  block.size_bytes = static_cast<std::int64_t>(
      std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(size_bytes, 4096))));
  block.device = device_memory(block.size_bytes, gpu_->stream());
  block.pinned = pinned_memory(block.size_bytes);
  for (cudaEvent_t* event : {&block.uploaded, &block.used}) {
    gpu_->check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event", "plan");
  }
  return block;
}

GpuPlan::GpuPlan(std::shared_ptr<PlanPool> pool, std::shared_ptr<GpuRank> gpu,
                 const SequencePlan& plan)
    : pool_(std::move(pool)),
      gpu_(std::move(gpu)),
      max_chunks_(std::ssize(plan.chunks)),
      max_places_(std::ssize(plan.places)),
      block_(pool_->take(table_bytes(max_chunks_, max_places_))) {}

// Asks nothing of a stream: the caller may have destroyed it before the plan.
GpuPlan::~GpuPlan() { pool_->give(std::move(block_)); }

void GpuPlan::note_use(cudaStream_t stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  gpu_->check(cudaStreamIsCapturing(stream, &status), "asking about a capture", "plan");
  if (status != cudaStreamCaptureStatusNone) return;
  gpu_->check(cudaEventRecord(block_.used, stream), "recording an event", "plan");
}

void GpuPlan::fill(const SequencePlan& plan, cudaStream_t stream) {
  const auto chunks = std::ssize(plan.chunks);
  const auto places = std::ssize(plan.places);
  require(chunks <= max_chunks_ && places <= max_places_, "replace_plan: the plan has ", chunks,
          " chunks and ", places, " places, expected at most ", max_chunks_, " and ", max_places_,
          ", as the first one had");
  // The pinned memory may still be on its way to the device, and the device memory in use.
  gpu_->check(cudaEventSynchronize(block_.uploaded), "waiting for the last upload", "plan");
  gpu_->check(cudaStreamWaitEvent(stream, block_.used, 0), "ordering streams", "plan");
  auto* const pinned = static_cast<std::byte*>(block_.pinned.get());
  const PlanHead head{chunks};
  std::memcpy(pinned, &head, sizeof(head));
  if (chunks > 0) {
    std::memcpy(pinned + head_bytes, plan.chunks.data(), at(chunks * chunk_size));
  }
  // Places lie behind the room for chunks, so that they stay where they are.
  const std::int64_t places_at = head_bytes + max_chunks_ * chunk_size;
  if (places > 0) {
    std::memcpy(pinned + places_at, plan.places.data(), at(places * place_size));
  }
  auto* const device = static_cast<std::byte*>(block_.device.get());
  const auto copy = [&](std::int64_t from, std::int64_t size) {
    gpu_->check(
        cudaMemcpyAsync(device + from, pinned + from, at(size), cudaMemcpyHostToDevice, stream),
        "uploading a plan", "plan");
  };
  if (chunks == max_chunks_) {
    copy(0, places_at + places * place_size);
  } else {
    copy(0, head_bytes + chunks * chunk_size);
    if (places > 0) copy(places_at, places * place_size);
  }
  gpu_->check(cudaEventRecord(block_.uploaded, stream), "recording an event", "plan");
  gpu_->check(cudaEventRecord(block_.used, stream), "recording an event", "plan");
}

void GpuPlan::point(SequenceParams& params) const {
  const auto* const device = static_cast<const std::byte*>(block_.device.get());
  params.head = reinterpret_cast<const PlanHead*>(device);
  params.chunks = reinterpret_cast<const RowChunk*>(device + head_bytes);
  params.places =
      reinterpret_cast<const std::uint64_t*>(device + head_bytes + max_chunks_ * chunk_size);
}

}  // namespace waybill::cuda
