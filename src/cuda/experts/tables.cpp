#include "tables.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "../rank/gpu_rank.h"
#include "core/memory_layout.h"
#include "kernels.h"
#include "runtime/executor.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

/// Lets the thread allocate while one of its streams is being captured.
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
  cuda_check(cudaMalloc(&memory, size_bytes), "allocating device memory");
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
      // One word per rank, and one to and one from each node.
      const std::int64_t bytes =
          std::int64_t{3} * gpu_->topology().world_size * std::int64_t{sizeof(HostCount)};
      made.counts = pinned_memory(bytes);
      std::memset(made.counts.get(), 0, bytes);
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

namespace {

using waybill::detail::MemoryLayout;

/// Compact rows have places in the grouped order, too.
std::int64_t max_grouped_rows(const EPConfig& config, EPDispatchOptions options) {
  options.rows = EPRows::grouped;
  options.spare_experts = 0;  // the config's experts are slots
  return most_recv_rows(config, options);
}

/// Gives a table the next bytes of a memory.
DeviceTable take_table(MemoryLayout& parts, const Shape& shape,
                       std::int64_t element_bytes = sizeof(std::int32_t)) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return {parts.take(count, element_bytes), shape};
}

}  // namespace

RoutingTables::RoutingTables(const EPConfig& config, const EPDispatchOptions& options,
                             std::int64_t max_rows)
    : capacity_rows(max_rows) {
  const bool is_compact = options.rows == EPRows::compact;
  const std::int64_t world = config.world_size;
  const std::int64_t nodes = config.num_nodes();
  const std::int64_t crossed = nodes > 1 ? nodes : 0;  // 0 if there is one node
  const std::int64_t per_rank = config.num_experts_per_rank();
  const Shape by_slot = {nodes, config.max_tokens, config.topk};
  MemoryLayout parts;
  ids = take_table(parts, by_slot);
  dst_rows = take_table(parts, by_slot);
  addresses = take_table(parts, by_slot, sizeof(std::int64_t));
  records = take_table(parts, {world, config.max_tokens, config.topk + (is_compact ? 1 : 0)});
  grouped_to_compact = take_table(parts, {is_compact ? max_grouped_rows(config, options) : 0});
  send_reqs = take_table(parts, {crossed, 2, config.max_tokens});
  num_input_tokens = take_table(parts, {world});
  splits = take_table(parts, {world, config.num_experts + 1});
  segment_offsets = take_table(parts, {world, per_rank, world});
  expert_counts = take_table(parts, {per_rank});
  expert_offsets = take_table(parts, {per_rank + 1});
  num_recv_rows = take_table(parts, {world + 1});
  node_tokens = take_table(parts, {2, crossed, config.max_tokens});
  node_counts = take_table(parts, {2, crossed});
  const Shape by_place = {options.spare_experts > 0 ? world : 0, per_rank};
  slot_experts = take_table(parts, by_place);
  slot_quotas = take_table(parts, by_place);
  first_by_row = parts.total();
  const std::int64_t compact = is_compact ? capacity_rows : 0;
  const std::int64_t grouped = capacity_rows - compact;
  tags = take_table(parts, {capacity_rows, 4});
  primary_rows = take_table(parts, {grouped});
  topk_slot_rows = take_table(parts, {grouped, config.topk});
  compact_to_grouped = take_table(parts, {compact, config.topk});
  topk = take_table(parts, {compact, config.topk});
  for (DeviceTable* table : {&tags, &primary_rows, &topk_slot_rows, &compact_to_grouped, &topk}) {
    table->by_row = true;
  }
  total_bytes = parts.total();
}

GpuExpertRouting::GpuExpertRouting(const EPConfig& config, const EPDispatchOptions& options,
                                   std::int64_t capacity_rows, std::int64_t num_tokens,
                                   std::uint64_t ticket, std::shared_ptr<TablePool> pool,
                                   std::shared_ptr<GpuRank> gpu, const TableCall& call)
    : config_(config),
      options_(options),
      tables_(config, options, capacity_rows),
      num_tokens_(num_tokens),
      ticket_(ticket),
      pool_(std::move(pool)),
      gpu_(std::move(gpu)),
      stream_(call.stream),
      memory_(pool_->take(tables_.total_bytes, true, call)) {}

void GpuExpertRouting::fit(std::int64_t capacity_rows, const TableCall& call) {
  if (capacity_rows <= tables_.capacity_rows) return;
  tables_ = RoutingTables(config_, options_, capacity_rows);
  grown_ = pool_->take(tables_.total_bytes - tables_.first_by_row, false, call);
}

void GpuExpertRouting::note_use(const TableCall& call) const {
  memory_.note_use(call);
  if (grown_.is_there()) grown_.note_use(call);
}

void GpuExpertRouting::note_use(const Stream& stream) const {
  const OnDevice on(gpu_->device());  // the null stream belongs to the thread's device
  note_use(table_call(*gpu_, stream_of(stream)));
}

Shape GpuExpertRouting::shape_by_id() const {
  if (config_.num_nodes() == 1) return {num_tokens_, config_.topk};
  return {config_.num_nodes(), config_.max_tokens, config_.topk};
}

ExpertTableViews GpuExpertRouting::views() const {
  std::int64_t rows = tables_.capacity_rows;
  if (has_waited()) {
    rows = std::min<std::int64_t>(rows, wait_counts()[std::int64_t{config_.rank}]);
  }
  const auto view = [&](const DeviceTable& table) {
    Shape shape = table.shape;
    if (table.by_row) shape[0] = rows;
    return ConstTensorView(part(table), DType::int32, shape);
  };
  ExpertTableViews views;
  const std::int64_t world = config_.world_size;
  views.ids = {part(tables_.ids), DType::int32, shape_by_id()};
  views.dst_rows = view(tables_.dst_rows);
  if (config_.num_nodes() > 1) views.send_reqs = view(tables_.send_reqs);
  views.num_input_tokens = view(tables_.num_input_tokens);
  views.splits = view(tables_.splits);
  views.segment_offsets = view(tables_.segment_offsets);
  views.expert_counts = view(tables_.expert_counts);
  views.expert_offsets = view(tables_.expert_offsets);
  const std::int32_t* const recv_rows = part(tables_.num_recv_rows);
  views.num_recv_rows = {recv_rows, DType::int32, {world}};
  views.required_rows = {recv_rows + world, DType::int32, {1}};
  views.recv_tags = view(tables_.tags);
  if (options_.spare_experts > 0) {
    views.slot_experts = view(tables_.slot_experts);
    views.slot_quotas = view(tables_.slot_quotas);
  }
  if (options_.rows == EPRows::compact) {
    views.compact_to_grouped = view(tables_.compact_to_grouped);
    views.grouped_to_compact = view(tables_.grouped_to_compact);
    views.recv_topk = view(tables_.topk);
  } else {
    views.primary_rows = view(tables_.primary_rows);
    views.topk_slot_rows = view(tables_.topk_slot_rows);
  }
  return views;
}

std::span<const std::int32_t> GpuExpertRouting::wait_counts() const {
  if (has_waited_) return num_recv_rows_;
  const HostCount* const counts = memory_.counts();
  // The kernel has a deadline. If it reports an error, the stream fails.
  const auto have_come = [&] {
    for (std::int32_t i = 0; i < num_counts(); ++i) {
      if (counts[i] >> ticket_shift != ticket_) return false;
    }
    return true;
  };
  WaitOptions options = gpu_->wait_options("dispatch");
  options.gives_turn = true;
  PollingWait wait(std::numeric_limits<double>::infinity(), std::move(options));
  for (int spin = 0; !have_come(); ++spin) {
    if (spin % 256 != 255) continue;
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      (void)wait.pause();
      continue;
    }
    gpu_->check(status, "waiting for counts", "dispatch");
    gpu_->throw_fault();
  }
  const std::lock_guard lock(mutex_);
  if (has_waited_) return num_recv_rows_;
  num_recv_rows_.resize(std::int64_t{config_.world_size});
  for (std::size_t r = 0; r < num_recv_rows_.size(); ++r) {
    num_recv_rows_[r] = static_cast<std::int32_t>(counts[r]);
  }
  const std::int32_t nodes = counts_nodes_ ? config_.num_nodes() : 0;
  for (std::int32_t n = 0; n < nodes; ++n) {
    node_rows_.sent.push_back(static_cast<std::int32_t>(counts[config_.world_size + n]));
    node_rows_.received.push_back(
        static_cast<std::int32_t>(counts[config_.world_size + nodes + n]));
  }
  has_waited_ = true;
  return num_recv_rows_;
}

const NodeRows& GpuExpertRouting::wait_node_rows() const {
  if (!counts_nodes_)
    throw InternalError("experts: this routing's rows between nodes were not counted");
  (void)wait_counts();
  return node_rows_;
}

GpuExpertTables::GpuExpertTables(std::shared_ptr<const GpuExpertRouting> routing,
                                 std::shared_ptr<GpuExpertRouting> being_made, TableMemory weights,
                                 DType weight_dtype, const TableCall& call)
    : routing_(std::move(routing)),
      being_made_(std::move(being_made)),
      weights_(std::move(weights)),
      weight_dtype_(weight_dtype),
      begun_(call) {}

/// If a dispatch was given up between its halves, work of the first half may still run. An event
/// that a recording takes does not cover this work; then the memory never gets another owner.
GpuExpertTables::~GpuExpertTables() {
  if (!begun_) return;
  try {
    TableCall last = *begun_;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    if (last.capture == 0 &&
        cudaStreamGetCaptureInfo(last.stream, &status, &capture) == cudaSuccess &&
        status != cudaStreamCaptureStatusNone) {
      last.capture = capture;
    }
    note_use(last, true);
  } catch (...) {  // the device is lost, and nobody will use the memory again
  }
}

ConstTensorView GpuExpertTables::weights() const {
  if (!has_weights()) return {};
  return {weights_.data(), weight_dtype_, routing_->shape_by_id()};
}

void GpuExpertTables::finish(const TableCall& call) {
  note_use(call, true);
  being_made_.reset();
  begun_.reset();
}

void GpuExpertTables::note_use(const TableCall& call, bool with_weights) const {
  routing_->note_use(call);
  if (!with_weights || !has_weights()) return;
  weights_.note_use(call);
  if (received_.is_there()) received_.note_use(call);
}

}  // namespace waybill::cuda
