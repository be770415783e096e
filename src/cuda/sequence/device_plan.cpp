#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "../rank/gpu_rank.h"
#include "core/memory_layout.h"
#include "executor.h"
#include "runtime/fingerprint.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

/// Segments and addresses for which a plan has room in any case, as far as its chunks could be as
/// many.
constexpr std::int64_t spare_segments = 4096;

}  // namespace

/// The one list of the tables: visit(table, its values on the host, their number, the number for
/// which a plan like this one has room, name). There are no values on the host of the head, and of
/// tables that the device makes.
template <class Visit>
void GpuPlan::for_each_table(const SequencePlan& plan, Visit&& visit) {
  const auto list = [&](Table which, const auto& values, std::int64_t room, const char* name) {
    visit(which, values.data(), std::ssize(values), room, name);
  };
  // With batches there is room for plans with twice as many, and some more, or as asked for.
  const auto twice = [&](std::int64_t count) {
    constexpr std::int64_t spare = 64;
    const bool none = plan.batches.empty() && plan.network.empty() && plan.min_batches == 0;
    return none ? 0 : 2 * count + spare;
  };
  const auto with_spare = [](std::int64_t count, std::int64_t of_chunks, std::int64_t spare) {
    return std::max(count, std::min(of_chunks, spare));
  };
  const std::int64_t num_batches = std::ssize(plan.batches);
  const std::int64_t max_batches = std::max<std::int64_t>(twice(num_batches), plan.min_batches);
  const NetworkProgram& network = plan.network;
  const std::int64_t num_steps = std::ssize(network.steps);
  visit(head, static_cast<const PlanHead*>(nullptr), 1, 1, "heads");
  list(bucket_chunks, plan.bucket_chunks, plan.world_size, "buckets");
  list(segments, plan.segments,
       with_spare(std::ssize(plan.segments), plan.num_chunks, spare_segments), "segments");
  list(segment_addresses, plan.segment_addresses,
       with_spare(std::ssize(plan.segment_addresses), plan.num_addresses, 4 * spare_segments),
       "places of segments");
  list(batches, plan.batches, max_batches, "batches");
  list(waits, plan.waits, 2 * std::ssize(plan.waits) + max_batches, "waits");
  list(signals, plan.signals, 2 * std::ssize(plan.signals) + max_batches, "signals");
  list(steps, network.steps, twice(num_steps), "steps to other nodes");
  list(puts, network.puts, twice(std::ssize(network.puts)), "puts to other nodes");
  list(step_waits, network.waits, twice(std::ssize(network.waits)),
       "waits of steps to other nodes");
  list(step_signals, network.signals, twice(std::ssize(network.signals)), "signals to other nodes");
  const auto make = [&]<class T>(Table which, T /*entry*/, std::int64_t count, std::int64_t room,
                                 const char* name) {
    visit(which, static_cast<const T*>(nullptr), count, room, name);
  };
  make(chunks, RowChunk{}, plan.num_chunks, plan.num_chunks, "chunks");
  make(addresses, std::uint64_t{}, plan.num_addresses, plan.num_addresses, "places");
  make(chunk_batches, std::int32_t{}, num_batches > 0 ? plan.num_chunks : 0,
       max_batches > 0 ? plan.num_chunks : 0, "chunks of batches");
  make(done, unsigned{}, num_batches, max_batches, "batches");
  make(steps_done, unsigned{}, num_steps, twice(num_steps), "steps to other nodes");
  make(ready, std::uint64_t{}, network.num_ready, twice(num_steps), "counters of steps");
}

PlanPool::~PlanPool() {
  for (const PlanBlock& block : free_) {
    (void)cudaEventDestroy(block.uploaded);
    (void)cudaEventDestroy(block.used);
  }
}

/// A block without memory where none fits; then there is room for one more.
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
    : pool_(std::move(pool)), gpu_(std::move(gpu)) {
  waybill::detail::MemoryLayout layout;
  for_each_table(plan, [&]<class T>(Table which, const T* /*values*/, std::int64_t /*count*/,
                                    std::int64_t room, const char* /*name*/) {
    room_[which] = room;
    at_[which] = layout.take(room, sizeof(T));
  });
  block_ = pool_->take(layout.total(), at_[chunks]);
}

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
T* GpuPlan::table(Table which) const {
  return reinterpret_cast<T*>(static_cast<std::byte*>(block_.device.get()) + at_[which]);
}

void GpuPlan::write_upload(const SequencePlan& plan) const {
  auto* const pinned = static_cast<std::byte*>(block_.pinned.get());
  auto& words = *new (pinned) PlanHead{};
  words.num_chunks = plan.num_chunks;
  words.num_wire_chunks = plan.num_wire_chunks;
  const FingerprintWords packed =
      pack_fingerprint({.plan = plan.fingerprint, .formats = plan.formats});
  words.fingerprint[0] = packed[1];
  words.fingerprint[1] = packed[2];
  words.world_size = plan.world_size;
  words.num_tensors = static_cast<std::int32_t>(plan.tensors.size());
  words.num_batches = static_cast<std::int32_t>(plan.batches.size());
  const bool halves = !plan.tensors.empty() && dtype_bytes(plan.tensors[0].dtype) == 2;
  words.sum_scale = halves ? 2 : 1;
  words.num_network_puts = static_cast<std::int32_t>(plan.network.puts.size());
  std::ranges::copy(plan.cuts, words.cuts);
  std::ranges::copy(plan.window_offsets, words.window_offsets);
  for_each_table(plan, [&]<class T>(Table which, const T* values, std::int64_t count,
                                    std::int64_t /*room*/, const char* /*name*/) {
    if (values != nullptr && count > 0) std::memcpy(pinned + at_[which], values, count * sizeof(T));
  });
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
  for_each_table(plan, [&](Table which, const auto* /*values*/, std::int64_t count,
                           std::int64_t /*room*/, const char* name) {
    require(count <= room_[which], "replace_plan: the plan has ", count, " ", name,
            ", expected at most ", room_[which]);
  });
  if (plan.tensors.size() > max_call_tensors) {
    throw Unsupported(
        concat("plan: ", plan.tensors.size(), " tensors, expected at most ", max_call_tensors));
  }
}

/// Tables that nearly adjoin go in one copy.
void GpuPlan::queue_upload(const SequencePlan& plan, cudaStream_t stream) const {
  constexpr std::int64_t max_gap = 4096;
  auto* const pinned = static_cast<std::byte*>(block_.pinned.get());
  auto* const device = static_cast<std::byte*>(block_.device.get());
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const auto copy = [&] {
    if (begin == end) return;
    gpu_->check(cudaMemcpyAsync(device + begin, pinned + begin, end - begin, cudaMemcpyHostToDevice,
                                stream),
                "uploading a plan", "plan");
  };
  for_each_table(plan, [&]<class T>(Table which, const T* /*values*/, std::int64_t count,
                                    std::int64_t /*room*/, const char* /*name*/) {
    const auto bytes = count * std::int64_t{sizeof(T)};
    if (bytes == 0) return;
    if (which < chunks) {
      if (at_[which] - end > max_gap) {
        copy();
        begin = at_[which];
      }
      end = at_[which] + bytes;
    } else if (which >= done) {
      gpu_->check(cudaMemsetAsync(device + at_[which], 0, bytes, stream), "uploading a plan",
                  "plan");
    }
  });
  copy();
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
  const ExpandParams params{.head = table<const PlanHead>(head),
                            .bucket_chunks = table<const std::int64_t>(bucket_chunks),
                            .segments = table<const RowSegment>(segments),
                            .segment_addresses = table<const std::uint64_t>(segment_addresses),
                            .chunks = table<RowChunk>(chunks),
                            .addresses = table<std::uint64_t>(addresses),
                            .chunk_batches = table<std::int32_t>(chunk_batches)};
  gpu_->check(launch_expand_plan(params, std::ssize(plan.segments), stream), "launching a kernel",
              "plan");
  gpu_->check(cudaEventRecord(block_.used, stream), "recording an event", "plan");
}

const std::uint64_t* GpuPlan::fingerprint() const {
  return table<const PlanHead>(head)->fingerprint;
}

void GpuPlan::point(SequenceParams& params) const {
  params.arrive.fingerprint.plan = fingerprint();
  params.head = table<const PlanHead>(head);
  params.chunks = table<const RowChunk>(chunks);
  params.addresses = table<const std::uint64_t>(addresses);
  params.batches = table<const WorkBatch>(batches);
  params.waits = table<const BatchSlot>(waits);
  params.signals = table<const BatchSlot>(signals);
  params.chunk_batches = table<const std::int32_t>(chunk_batches);
  params.done = table<unsigned>(done);
  params.ready = table<std::uint64_t>(ready);
}

PathTables GpuPlan::path_tables() const {
  return {.num_puts = &table<const PlanHead>(head)->num_network_puts,
          .steps = table<const NetworkStep>(steps),
          .puts = table<const NetworkPut>(puts),
          .waits = table<const BatchSlot>(step_waits),
          .signals = table<const BatchSlot>(step_signals),
          .done = table<unsigned>(steps_done),
          .ready = table<std::uint64_t>(ready),
          .num_steps = 0,
          .first_steps = 0,
          .steps_of_peer = 0,
          .one_block_of_peer = false};
}

}  // namespace waybill::cuda
