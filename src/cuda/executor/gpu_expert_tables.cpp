#include "gpu_expert_tables.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "cuda_check.h"
#include "waybill/core/at.h"

namespace waybill::cuda {
namespace {

using waybill::detail::at;

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
  cuda_check(cudaMalloc(&memory, at(size_bytes)), "allocating device memory");
  return {memory, [device](void* owned) {
            int current = 0;
            (void)cudaGetDevice(&current);
            (void)cudaSetDevice(device);
            (void)cudaFree(owned);
            (void)cudaSetDevice(current);
          }};
}

}  // namespace

TableLayout::TableLayout(const EPConfig& config, const EPDispatchOptions& options,
                         std::int64_t capacity_rows)
    : capacity(capacity_rows) {
  const bool is_compact = options.rows == EPRows::compact;
  const std::int64_t world = config.world_size;
  const std::int64_t choices = config.max_tokens * config.topk;
  const std::int64_t per_rank = config.num_experts_per_rank();
  std::int64_t next = 0;
  const auto take = [&](std::int64_t count, std::int64_t element_bytes = 4) {
    const std::int64_t here = next;
    next += (count * element_bytes + 255) / 256 * 256;
    return here;
  };
  ids = take(choices);
  dst_rows = take(choices);
  weights = take(choices, dtype_bytes(config.weight_dtype));
  places = take(choices, 8);
  records = take(world * config.max_tokens * (config.topk + (is_compact ? 1 : 0)));
  num_input_tokens = take(world);
  splits = take(world * (config.num_experts + 1));
  segment_offsets = take(world * config.num_experts);
  expert_counts = take(per_rank);
  expert_offsets = take(per_rank + 1);
  num_recv_rows = take(world);
  leader_rows = take(is_compact ? 0 : capacity);
  choice_rows = take(is_compact ? 0 : capacity * config.topk);
  tags = take(capacity, sizeof(MoeTag));
  compact_to_grouped = take(is_compact ? capacity * config.topk : 0);
  grouped_to_compact = take(is_compact ? world * choices + per_rank * options.expert_alignment : 0);
  topk = take(is_compact ? capacity * config.topk : 0);
  total = next;
}

TablePool::~TablePool() {
  for (const TableMemory& memory : free_) (void)cudaEventDestroy(memory.used);
}

TableMemory TablePool::take(const TableLayout& layout, cudaStream_t stream, bool capturing) {
  const auto fits = [&](const TableMemory& memory) {
    return memory.captured == capturing && memory.capacity == layout.capacity;
  };
  const RelaxedCapture relaxed;
  if (const auto found = std::ranges::find_if(free_, fits); found != free_.end()) {
    TableMemory memory = std::move(*found);
    free_.erase(found);
    if (!capturing) {
      gpu_->check(cudaStreamWaitEvent(stream, memory.used, 0), "ordering streams", "dispatch");
    }
    return memory;
  }
  TableMemory memory;
  memory.device = plain_device_memory(layout.total, gpu_->device());
  memory.counts = pinned_memory(sizeof(MoeHostCounts));
  *static_cast<MoeHostCounts*>(memory.counts.get()) = {};
  memory.capacity = layout.capacity;
  memory.captured = capturing;
  cuda_check(cudaEventCreateWithFlags(&memory.used, cudaEventDisableTiming), "making an event");
  return memory;
}

void TablePool::give_back(TableMemory memory) { free_.push_back(std::move(memory)); }

GpuExpertTables::GpuExpertTables(const EPConfig& config, const EPDispatchOptions& options,
                                 const TableLayout& layout, std::shared_ptr<TablePool> pool,
                                 std::shared_ptr<GpuRank> gpu, TableMemory memory)
    : config_(config),
      options_(options),
      layout_(layout),
      pool_(std::move(pool)),
      gpu_(std::move(gpu)),
      memory_(std::move(memory)) {}

GpuExpertTables::~GpuExpertTables() { pool_->give_back(std::move(memory_)); }

void GpuExpertTables::note_use(cudaStream_t work, bool capturing) {
  if (capturing) {
    memory_.captured = true;
    return;
  }
  gpu_->check(cudaEventRecord(memory_.used, work), "recording an event", "dispatch");
}

ConstTensorView GpuExpertTables::view(std::int64_t offset, Shape shape) const {
  return {part(offset), DType::int32, std::move(shape)};
}

ExpertTableViews GpuExpertTables::views() const {
  const bool compact = options_.rows == EPRows::compact;
  const std::int64_t world = config_.world_size;
  const std::int64_t per_rank = config_.num_experts_per_rank();
  const std::int64_t topk = config_.topk;
  const std::int64_t rows = layout_.capacity;
  ExpertTableViews views;
  views.ids = view(layout_.ids, {num_tokens, topk});
  views.dst_rows = view(layout_.dst_rows, {1, config_.max_tokens, topk});
  if (has_weights) {
    views.weights = {part<std::byte>(layout_.weights), config_.weight_dtype,
                     Shape{num_tokens, topk}};
  }
  views.num_input_tokens = view(layout_.num_input_tokens, {world});
  views.splits = view(layout_.splits, {world, config_.num_experts + 1});
  views.segment_offsets = view(layout_.segment_offsets, {world, per_rank, world});
  views.expert_counts = view(layout_.expert_counts, {per_rank});
  views.expert_offsets = view(layout_.expert_offsets, {per_rank + 1});
  views.num_recv_rows = view(layout_.num_recv_rows, {world});
  views.recv_tags = view(layout_.tags, {rows, 4});
  if (compact) {
    views.compact_to_grouped = view(layout_.compact_to_grouped, {rows, topk});
    views.grouped_to_compact =
        view(layout_.grouped_to_compact,
             {world * config_.max_tokens * topk + per_rank * options_.expert_alignment});
    views.recv_topk = view(layout_.topk, {rows, topk});
  } else {
    views.leader_rows = view(layout_.leader_rows, {rows});
    views.choice_rows = view(layout_.choice_rows, {rows, topk});
  }
  return views;
}

std::span<const std::int32_t> GpuExpertTables::wait_counts() {
  // The kernel has the deadline; what it reports ends the stream.
  for (int spin = 0; counts()->ticket != ticket; ++spin) {
    if (spin % 256 != 255) continue;
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      std::this_thread::yield();
      continue;
    }
    gpu_->check(status, "waiting for counts", "dispatch");
  }
  num_recv_rows_.resize(at(std::int64_t{config_.world_size}));
  for (std::size_t r = 0; r < num_recv_rows_.size(); ++r) {
    num_recv_rows_[r] = counts()->num_recv_rows[r];
  }
  return num_recv_rows_;
}

}  // namespace waybill::cuda
