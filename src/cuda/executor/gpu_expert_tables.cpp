#include "gpu_expert_tables.h"

#include <algorithm>
#include <cstring>
#include <limits>
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

/// Parts of one block of memory, each at a multiple of 256 bytes.
struct Parts {
  std::int64_t total = 0;

  std::int64_t take(std::int64_t count, std::int64_t element_bytes = 4) {
    const std::int64_t here = total;
    total += (count * element_bytes + 255) / 256 * 256;
    return here;
  }
};

std::int64_t most_grouped_rows(const EPConfig& config, const EPDispatchOptions& options) {
  return config.world_size * config.max_tokens * config.topk +
         config.num_experts_per_rank() * options.expert_alignment;
}

}  // namespace

FixedTables::FixedTables(const EPConfig& config, const EPDispatchOptions& options) {
  const bool is_compact = options.rows == EPRows::compact;
  const std::int64_t world = config.world_size;
  const std::int64_t nodes = config.num_nodes();
  const std::int64_t choices = nodes * config.max_tokens * config.topk;
  const std::int64_t per_rank = config.num_experts_per_rank();
  Parts parts;
  ids = parts.take(choices);
  dst_rows = parts.take(choices);
  weights = parts.take(choices, dtype_bytes(config.weight_dtype));
  places = parts.take(choices, 8);
  records = parts.take(world * config.max_tokens * (config.topk + (is_compact ? 1 : 0)));
  grouped_to_compact = parts.take(is_compact ? most_grouped_rows(config, options) : 0);
  send_reqs = parts.take(nodes > 1 ? nodes * 2 * config.max_tokens : 0);
  num_input_tokens = parts.take(world);
  splits = parts.take(world * (config.num_experts + 1));
  segment_offsets = parts.take(world * config.num_experts);
  expert_counts = parts.take(per_rank);
  expert_offsets = parts.take(per_rank + 1);
  num_recv_rows = parts.take(world);
  total = parts.total;
}

RowTables::RowTables(const EPConfig& config, const EPDispatchOptions& options,
                     std::int64_t capacity_rows)
    : capacity(capacity_rows) {
  const bool is_compact = options.rows == EPRows::compact;
  Parts parts;
  tags = parts.take(capacity, sizeof(MoeTag));
  leader_rows = parts.take(is_compact ? 0 : capacity);
  choice_rows = parts.take(is_compact ? 0 : capacity * config.topk);
  compact_to_grouped = parts.take(is_compact ? capacity * config.topk : 0);
  topk = parts.take(is_compact ? capacity * config.topk : 0);
  total = parts.total;
}

TablePool::~TablePool() {
  for (const TableMemory& memory : free_) (void)cudaEventDestroy(memory.used);
}

TableMemory TablePool::take(std::int64_t size_bytes, cudaStream_t stream, bool capturing) {
  const auto fits = [&](const TableMemory& memory) {
    return memory.captured == capturing && memory.size_bytes == size_bytes;
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
  memory.device = plain_device_memory(size_bytes, gpu_->device());
  memory.counts = pinned_memory(sizeof(MoeHostCounts));
  std::memset(memory.counts.get(), 0, sizeof(MoeHostCounts));
  memory.size_bytes = size_bytes;
  memory.captured = capturing;
  cuda_check(cudaEventCreateWithFlags(&memory.used, cudaEventDisableTiming), "making an event");
  return memory;
}

void TablePool::give_back(TableMemory memory) { free_.push_back(std::move(memory)); }

GpuExpertTables::GpuExpertTables(const EPConfig& config, const EPDispatchOptions& options,
                                 std::int64_t capacity, std::shared_ptr<TablePool> pool,
                                 std::shared_ptr<GpuRank> gpu, cudaStream_t route_stream,
                                 bool capturing)
    : stream(route_stream),
      config_(config),
      options_(options),
      fixed_(config, options),
      rows_(config, options, capacity),
      pool_(std::move(pool)),
      gpu_(std::move(gpu)),
      memory_(pool_->take(fixed_.total, stream, capturing)),
      row_memory_(pool_->take(rows_.total, stream, capturing)) {}

GpuExpertTables::~GpuExpertTables() {
  pool_->give_back(std::move(memory_));
  pool_->give_back(std::move(row_memory_));
}

void GpuExpertTables::fit(std::int64_t capacity, cudaStream_t work, bool capturing) {
  if (are_filled || capacity <= rows_.capacity) return;
  rows_ = RowTables(config_, options_, capacity);
  pool_->give_back(std::exchange(row_memory_, pool_->take(rows_.total, work, capturing)));
}

void GpuExpertTables::note_use(cudaStream_t work, bool capturing) {
  for (TableMemory* memory : {&memory_, &row_memory_}) {
    if (capturing) {
      memory->captured = true;
    } else {
      gpu_->check(cudaEventRecord(memory->used, work), "recording an event", "dispatch");
    }
  }
}

ExpertTableViews GpuExpertTables::views() const {
  const bool compact = options_.rows == EPRows::compact;
  const std::int64_t world = config_.world_size;
  const std::int64_t per_rank = config_.num_experts_per_rank();
  const std::int64_t topk = config_.topk;
  std::int64_t rows = rows_.capacity;
  if (!num_recv_rows_.empty()) {
    rows = std::min<std::int64_t>(rows, num_recv_rows_[at(std::int64_t{config_.rank})]);
  }
  const auto view = [&](std::int64_t offset, Shape shape) {
    return ConstTensorView(part(offset), DType::int32, std::move(shape));
  };
  const auto row_view = [&](std::int64_t offset, Shape shape) {
    return ConstTensorView(row_part(offset), DType::int32, std::move(shape));
  };
  ExpertTableViews views;
  const std::int64_t nodes = config_.num_nodes();
  const Shape columns{nodes, config_.max_tokens, topk};
  const Shape by_id = nodes == 1 ? Shape{num_tokens, topk} : columns;
  views.ids = view(fixed_.ids, by_id);
  views.dst_rows = view(fixed_.dst_rows, columns);
  if (has_weights) {
    views.weights = {part<std::byte>(fixed_.weights), config_.weight_dtype, by_id};
  }
  if (nodes > 1) views.send_reqs = view(fixed_.send_reqs, {nodes, 2, config_.max_tokens});
  views.num_input_tokens = view(fixed_.num_input_tokens, {world});
  views.splits = view(fixed_.splits, {world, config_.num_experts + 1});
  views.segment_offsets = view(fixed_.segment_offsets, {world, per_rank, world});
  views.expert_counts = view(fixed_.expert_counts, {per_rank});
  views.expert_offsets = view(fixed_.expert_offsets, {per_rank + 1});
  views.num_recv_rows = view(fixed_.num_recv_rows, {world});
  views.recv_tags = row_view(rows_.tags, {rows, 4});
  if (compact) {
    views.compact_to_grouped = row_view(rows_.compact_to_grouped, {rows, topk});
    views.grouped_to_compact =
        view(fixed_.grouped_to_compact, {most_grouped_rows(config_, options_)});
    views.recv_topk = row_view(rows_.topk, {rows, topk});
  } else {
    views.leader_rows = row_view(rows_.leader_rows, {rows});
    views.choice_rows = row_view(rows_.choice_rows, {rows, topk});
  }
  return views;
}

std::span<const std::int32_t> GpuExpertTables::wait_counts() {
  // The kernel has the deadline; what it reports ends the stream.
  const auto have_come = [&] {
    for (std::int32_t r = 0; r < config_.world_size; ++r) {
      if (counts()->rows[r] >> ticket_shift != ticket) return false;
    }
    return true;
  };
  PollingWait wait(std::numeric_limits<double>::infinity(), gpu_->wait_options("dispatch"));
  for (int spin = 0; !have_come(); ++spin) {
    if (spin % 256 != 255) continue;
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      (void)wait.pause();
      continue;
    }
    gpu_->check(status, "waiting for counts", "dispatch");
    gpu_->throw_fault("dispatch");
  }
  num_recv_rows_.resize(at(std::int64_t{config_.world_size}));
  for (std::size_t r = 0; r < num_recv_rows_.size(); ++r) {
    num_recv_rows_[r] = static_cast<std::int32_t>(counts()->rows[r]);
  }
  return num_recv_rows_;
}

}  // namespace waybill::cuda
