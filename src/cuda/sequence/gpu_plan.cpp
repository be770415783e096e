#include "gpu_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "../rank/gpu_rank.h"
#include "core/memory_layout.h"
#include "runtime/fingerprint.h"
#include "sequence_launch.h"

namespace waybill::cuda {
namespace {

/// Segments and addresses for which a plan has room in any case, as far as its chunks could be as
/// many.
constexpr std::int64_t spare_segments = 4096;

template <class T>
void copy_values(std::byte* to, const std::vector<T>& values) {
  if (!values.empty()) std::memcpy(to, values.data(), values.size() * sizeof(T));
}

void check_count(std::size_t count, std::int64_t most, const char* what) {
  require(static_cast<std::int64_t>(count) <= most, "replace_plan: the plan has ", count, " ", what,
          ", expected at most ", most);
}

}  // namespace

PlanLayout::PlanLayout(const SequencePlan& plan)
    : max_chunks(plan.num_chunks), max_addresses(plan.num_addresses) {
  max_segments =
      std::max<std::int64_t>(std::ssize(plan.segments), std::min(max_chunks, spare_segments));
  const auto copies = std::ssize(plan.segment_addresses);
  max_segment_addresses =
      std::max<std::int64_t>(copies, std::min(max_addresses, 4 * spare_segments));
  waybill::detail::MemoryLayout parts;
  const auto take = [&]<class T>(T /*of*/, std::int64_t count) {
    return parts.take(count, std::int64_t{sizeof(T)});
  };
  (void)parts.take(sizeof(PlanHead));
  bucket_chunks_at = take(std::int64_t{}, plan.world_size);
  segments_at = take(RowSegment{}, max_segments);
  segment_addresses_at = take(std::uint64_t{}, max_segment_addresses);
  // With batches there is room for plans with twice as many, and some more.
  const auto twice = [&](std::size_t count) {
    constexpr std::int64_t spare = 64;
    return plan.batches.empty() && plan.network.empty()
               ? 0
               : 2 * static_cast<std::int64_t>(count) + spare;
  };
  max_batches = twice(plan.batches.size());
  max_waits = 2 * std::ssize(plan.waits) + max_batches;
  max_signals = 2 * std::ssize(plan.signals) + max_batches;
  batches_at = take(WorkBatch{}, max_batches);
  waits_at = take(BatchSlot{}, max_waits);
  signals_at = take(BatchSlot{}, max_signals);
  const NetworkProgram& network = plan.network;
  max_steps = twice(network.steps.size());
  max_puts = twice(network.puts.size());
  max_step_waits = twice(network.waits.size());
  max_step_signals = twice(network.signals.size());
  steps_at = take(NetworkStep{}, max_steps);
  puts_at = take(NetworkPut{}, max_puts);
  step_waits_at = take(BatchSlot{}, max_step_waits);
  step_signals_at = take(BatchSlot{}, max_step_signals);
  upload_bytes = parts.total();
  chunks_at = take(RowChunk{}, max_chunks);
  addresses_at = take(std::uint64_t{}, max_addresses);
  chunk_batches_at = take(std::int32_t{}, max_batches > 0 ? max_chunks : 0);
  done_at = take(unsigned{}, max_batches);
  steps_done_at = take(unsigned{}, max_steps);
  ready_at = take(std::uint64_t{}, max_steps);
  size_bytes = parts.total();
}

PlanPool::~PlanPool() {
  for (const PlanBlock& block : free_) {
    (void)cudaEventDestroy(block.uploaded);
    (void)cudaEventDestroy(block.used);
  }
}

/// None: one without memory, and then there is room for one more.
PlanBlock PlanPool::find(std::int64_t size_bytes, std::int64_t upload_bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(free_, [&](const PlanBlock& block) {
    return block.size_bytes >= size_bytes && block.upload_bytes >= upload_bytes;
  });
  PlanBlock block;
  if (found != free_.end()) {
    block = std::move(*found);
    free_.erase(found);
  } else {
    free_.reserve(num_blocks_ + 1);
    ++num_blocks_;
  }
  return block;
}

void PlanPool::give(PlanBlock block) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(block));
}

PlanBlock PlanPool::take(std::int64_t size_bytes, std::int64_t upload_bytes) {
  PlanBlock block = find(size_bytes, upload_bytes);
  if (block.device != nullptr) return block;
  const auto room = [](std::int64_t bytes) {
    return static_cast<std::int64_t>(
        std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 4096))));
  };
  block.size_bytes = room(size_bytes);
  block.upload_bytes = room(upload_bytes);
  block.device = device_memory(block.size_bytes, gpu_->stream());
  block.pinned = pinned_memory(block.upload_bytes);
  for (cudaEvent_t* event : {&block.uploaded, &block.used}) {
    gpu_->check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event", "plan");
  }
  return block;
}

GpuPlan::GpuPlan(std::shared_ptr<PlanPool> pool, std::shared_ptr<GpuRank> gpu,
                 const SequencePlan& plan)
    : pool_(std::move(pool)),
      gpu_(std::move(gpu)),
      layout_(plan),
      block_(pool_->take(layout_.size_bytes, layout_.upload_bytes)) {}

// Asks nothing of a stream: the caller may have destroyed it before the plan.
GpuPlan::~GpuPlan() { pool_->give(std::move(block_)); }

void GpuPlan::note_use(cudaStream_t stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  gpu_->check(cudaStreamIsCapturing(stream, &status), "asking about a capture", "plan");
  if (status != cudaStreamCaptureStatusNone) {
    captured_ = true;
    return;
  }
  gpu_->check(cudaEventRecord(block_.used, stream), "recording an event", "plan");
}

template <class T>
T* GpuPlan::table(std::int64_t at) const {
  return reinterpret_cast<T*>(static_cast<std::byte*>(block_.device.get()) + at);
}

void GpuPlan::write_upload(const SequencePlan& plan) const {
  auto* const pinned = static_cast<std::byte*>(block_.pinned.get());
  auto& head = *new (pinned) PlanHead{};
  head.num_chunks = plan.num_chunks;
  head.num_wire_chunks = plan.num_wire_chunks;
  const FingerprintWords words =
      pack_fingerprint({.plan = plan.fingerprint, .formats = plan.formats});
  head.fingerprint[0] = words[1];
  head.fingerprint[1] = words[2];
  head.world_size = plan.world_size;
  head.num_tensors = static_cast<std::int32_t>(plan.tensors.size());
  head.num_batches = static_cast<std::int32_t>(plan.batches.size());
  const bool halves = !plan.tensors.empty() && dtype_bytes(plan.tensors[0].dtype) == 2;
  head.sum_scale = halves ? 2 : 1;
  head.num_network_puts = static_cast<std::int32_t>(plan.network.puts.size());
  std::ranges::copy(plan.cuts, head.cuts);
  std::ranges::copy(plan.window_offsets, head.window_offsets);
  copy_values(pinned + layout_.bucket_chunks_at, plan.bucket_chunks);
  copy_values(pinned + layout_.segments_at, plan.segments);
  copy_values(pinned + layout_.segment_addresses_at, plan.segment_addresses);
  copy_values(pinned + layout_.batches_at, plan.batches);
  copy_values(pinned + layout_.waits_at, plan.waits);
  copy_values(pinned + layout_.signals_at, plan.signals);
  copy_values(pinned + layout_.steps_at, plan.network.steps);
  copy_values(pinned + layout_.puts_at, plan.network.puts);
  copy_values(pinned + layout_.step_waits_at, plan.network.waits);
  copy_values(pinned + layout_.step_signals_at, plan.network.signals);
}

void GpuPlan::check_network_room(const NetworkProgram& network) const {
  check_count(network.steps.size(), layout_.max_steps, "steps to other nodes");
  check_count(network.puts.size(), layout_.max_puts, "puts to other nodes");
  check_count(network.waits.size(), layout_.max_step_waits, "waits of steps to other nodes");
  check_count(network.signals.size(), layout_.max_step_signals, "signals to other nodes");
}

/// A graph with a gradient copies as many rows to the same addresses as when it was captured.
void GpuPlan::check_staging(const SequencePlan& plan) const {
  if (!captured_ || plan.operation != SequenceOperation::kv_gradient) return;
  for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
    require(plan.window_rows[t] <= window_rows_[t] && plan.window_offsets[t] == window_offsets_[t],
            "replace_plan: a graph holds a gradient with ", window_rows_[t], " rows of tensor ", t,
            " at byte ", window_offsets_[t], " of the window, but the plan has ",
            plan.window_rows[t], " at byte ", plan.window_offsets[t],
            ", expected at most as many at the same place");
  }
}

void GpuPlan::check_room(const SequencePlan& plan) const {
  require(
      !fixed_,
      "replace_plan: a graph holds copies of this plan's ranges, expected a dispatcher with SMs "
      "and without local_by_copy_engine, and nodes that NCCL does not connect");
  require(!captured_ || plan.num_chunks == 0 || batched_ == !plan.batches.empty(),
          "replace_plan: a graph holds the plan ", batched_ ? "with" : "without",
          " forwarding, expected one of the same kind");
  check_staging(plan);
  require(plan.num_chunks <= layout_.max_chunks && plan.num_addresses <= layout_.max_addresses,
          "replace_plan: the plan has ", plan.num_chunks, " chunks and ", plan.num_addresses,
          " places, expected at most ", layout_.max_chunks, " and ", layout_.max_addresses,
          ", as the first one had");
  check_count(plan.segments.size(), layout_.max_segments, "segments");
  check_count(plan.segment_addresses.size(), layout_.max_segment_addresses, "places of segments");
  check_count(plan.batches.size(), layout_.max_batches, "batches");
  check_count(plan.waits.size(), layout_.max_waits, "waits");
  check_count(plan.signals.size(), layout_.max_signals, "signals");
  check_network_room(plan.network);
  if (plan.tensors.size() > max_call_tensors) {
    throw Unsupported(
        concat("plan: ", plan.tensors.size(), " tensors, expected at most ", max_call_tensors));
  }
}

void GpuPlan::queue_upload(const SequencePlan& plan, cudaStream_t stream) const {
  auto* const pinned = static_cast<std::byte*>(block_.pinned.get());
  auto* const device = static_cast<std::byte*>(block_.device.get());
  const auto copy = [&](std::int64_t from, std::size_t bytes) {
    if (bytes == 0) return;
    gpu_->check(
        cudaMemcpyAsync(device + from, pinned + from, bytes, cudaMemcpyHostToDevice, stream),
        "uploading a plan", "plan");
  };
  copy(0, layout_.segments_at + plan.segments.size() * sizeof(RowSegment));
  copy(layout_.segment_addresses_at, plan.segment_addresses.size() * sizeof(std::uint64_t));
  copy(layout_.batches_at, plan.batches.size() * sizeof(WorkBatch));
  copy(layout_.waits_at, plan.waits.size() * sizeof(BatchSlot));
  copy(layout_.signals_at, plan.signals.size() * sizeof(BatchSlot));
  copy(layout_.steps_at, plan.network.steps.size() * sizeof(NetworkStep));
  copy(layout_.puts_at, plan.network.puts.size() * sizeof(NetworkPut));
  copy(layout_.step_waits_at, plan.network.waits.size() * sizeof(BatchSlot));
  copy(layout_.step_signals_at, plan.network.signals.size() * sizeof(BatchSlot));
  const auto clear = [&](std::int64_t from, std::size_t bytes) {
    if (bytes == 0) return;
    gpu_->check(cudaMemsetAsync(device + from, 0, bytes, stream), "uploading a plan", "plan");
  };
  clear(layout_.done_at, plan.batches.size() * sizeof(unsigned));
  clear(layout_.steps_done_at, plan.network.steps.size() * sizeof(unsigned));
  clear(layout_.ready_at, plan.network.num_ready * sizeof(std::uint64_t));
}

void GpuPlan::fill(const SequencePlan& plan, cudaStream_t stream) {
  check_room(plan);
  // The pinned memory may still be on its way to the device, and the device memory in use.
  gpu_->wait_for(block_.uploaded, "waiting for the last upload", "plan");
  gpu_->check(cudaStreamWaitEvent(stream, block_.used, 0), "ordering streams", "plan");
  write_upload(plan);
  queue_upload(plan, stream);
  if (plan.num_chunks > 0) batched_ = !plan.batches.empty();
  if (!captured_) {
    window_offsets_ = plan.window_offsets;
    window_rows_ = plan.window_rows;
  }
  gpu_->check(cudaEventRecord(block_.uploaded, stream), "recording an event", "plan");
  const ExpandParams params{
      .head = table<const PlanHead>(0),
      .bucket_chunks = table<const std::int64_t>(layout_.bucket_chunks_at),
      .segments = table<const RowSegment>(layout_.segments_at),
      .segment_addresses = table<const std::uint64_t>(layout_.segment_addresses_at),
      .chunks = table<RowChunk>(layout_.chunks_at),
      .addresses = table<std::uint64_t>(layout_.addresses_at),
      .chunk_batches = table<std::int32_t>(layout_.chunk_batches_at)};
  gpu_->check(launch_expand_plan(params, std::ssize(plan.segments), stream), "launching a kernel",
              "plan");
  gpu_->check(cudaEventRecord(block_.used, stream), "recording an event", "plan");
}

const std::uint64_t* GpuPlan::fingerprint() const { return table<const PlanHead>(0)->fingerprint; }

void GpuPlan::point(SequenceParams& params) const {
  params.arrive.fingerprint.plan = fingerprint();
  params.head = table<const PlanHead>(0);
  params.chunks = table<const RowChunk>(layout_.chunks_at);
  params.addresses = table<const std::uint64_t>(layout_.addresses_at);
  params.batches = {.batches = table<const WorkBatch>(layout_.batches_at),
                    .waits = table<const BatchSlot>(layout_.waits_at),
                    .signals = table<const BatchSlot>(layout_.signals_at),
                    .chunk_batches = table<const std::int32_t>(layout_.chunk_batches_at),
                    .done = table<unsigned>(layout_.done_at)};
  params.ready = table<std::uint64_t>(layout_.ready_at);
}

PathTables GpuPlan::path_tables() const {
  return {.num_puts = &table<const PlanHead>(0)->num_network_puts,
          .steps = table<const NetworkStep>(layout_.steps_at),
          .puts = table<const NetworkPut>(layout_.puts_at),
          .waits = table<const BatchSlot>(layout_.step_waits_at),
          .signals = table<const BatchSlot>(layout_.step_signals_at),
          .done = table<unsigned>(layout_.steps_done_at),
          .ready = table<std::uint64_t>(layout_.ready_at),
          .num_steps = 0,
          .first_steps = 0,
          .steps_of_peer = 0,
          .one_block_of_peer = false};
}

}  // namespace waybill::cuda
