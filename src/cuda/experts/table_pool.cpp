#include "table_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../rank/cuda_check.h"
#include "core/to_size.h"

namespace waybill::cuda {
namespace {

using waybill::detail::to_size;

/// Lets the thread allocate while a stream of it is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

std::shared_ptr<void> plain_device_memory(std::int64_t size_bytes, int device) {
  void* memory = nullptr;
  cuda_check(cudaMalloc(&memory, to_size(size_bytes)), "allocating device memory");
  return {memory, [device](void* owned) {
            const OnDevice on(device);
            (void)cudaFree(owned);
          }};
}

}  // namespace

TableCall table_call(const GpuRank& gpu, cudaStream_t stream) {
  TableCall call{.stream = stream};
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  gpu.check(cudaStreamGetCaptureInfo(stream, &status, &capture), "asking about a capture",
            "dispatch");
  if (status != cudaStreamCaptureStatusNone) call.capture = capture;
  return call;
}

TableBlock::~TableBlock() {
  for (const Use& use : uses) (void)cudaEventDestroy(use.event);
  for (const cudaEvent_t event : idle_events) (void)cudaEventDestroy(event);
}

TableMemory::~TableMemory() {
  if (is_there()) pool_->give_back(block_);
}

void TableMemory::note_use(const TableCall& call) const {
  TableBlock& block = block_.front();
  const cudaStream_t stream = call.stream;
  const std::lock_guard lock(block.mutex);
  if (call.capture != block.capture && call.capture != 0) block.stays = true;
  if (call.capture != 0) return;
  const OnDevice on(pool_->gpu_->device());
  if (stream == block.taken_on) {
    std::erase_if(block.uses, [&](const TableBlock::Use& use) {
      const bool goes = use.is_old && use.stream != stream;
      if (goes) block.idle_events.push_back(use.event);
      return goes;
    });
  }
  auto use = std::ranges::find(block.uses, stream, &TableBlock::Use::stream);
  if (use == block.uses.end()) {
    cudaEvent_t event = nullptr;
    if (block.idle_events.empty()) {
      cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    } else {
      event = block.idle_events.back();
      block.idle_events.pop_back();
    }
    use = block.uses.insert(use, {stream, event, false});
  }
  use->is_old = false;
  pool_->gpu_->check(cudaEventRecord(use->event, stream), "recording an event", "dispatch");
}

void TablePool::find(std::int64_t size_bytes, bool with_counts, bool recorded,
                     std::list<TableBlock>& to) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(free_, [&](const TableBlock& block) {
    return (block.capture != 0) == recorded && block.size_bytes == size_bytes &&
           (block.counts != nullptr) == with_counts;
  });
  if (found != free_.end()) to.splice(to.end(), free_, found);
}

TableMemory TablePool::take(std::int64_t size_bytes, bool with_counts, const TableCall& call) {
  const RelaxedCapture relaxed;
  TableMemory memory;
  memory.pool_ = shared_from_this();
  find(size_bytes, with_counts, call.capture != 0, memory.block_);
  if (!memory.is_there()) {
    TableBlock& made = memory.block_.emplace_back();
    made.device = plain_device_memory(size_bytes, gpu_->device());
    if (with_counts) {
      // Of each rank, and to and from each node.
      const std::int64_t bytes =
          std::int64_t{3} * gpu_->topology().world_size * std::int64_t{sizeof(HostCount)};
      made.counts = pinned_memory(bytes);
      std::memset(made.counts.get(), 0, to_size(bytes));
    }
    made.size_bytes = size_bytes;
  }
  TableBlock& block = memory.block_.front();
  block.taken_on = call.stream;
  block.capture = call.capture;
  for (TableBlock::Use& use : block.uses) {
    use.is_old = true;
    if (call.capture != 0) continue;
    gpu_->check(cudaStreamWaitEvent(call.stream, use.event, 0), "ordering streams", "dispatch");
  }
  return memory;
}

void TablePool::give_back(std::list<TableBlock>& block) noexcept {
  const std::lock_guard lock(mutex_);
  std::list<TableBlock>& list = block.front().stays ? staying_ : free_;
  list.splice(list.end(), block);
}

}  // namespace waybill::cuda
