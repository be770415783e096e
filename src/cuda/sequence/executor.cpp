#include "executor.h"

#include <algorithm>

#include "../device/arrive_kernels.h"
#include "../experts/copies/copies.h"
#include "../experts/executor/executor.h"
#include "../rank/gpu_rank.h"
#include "waybill/core/error.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t bulk_alignment_bytes = 16;

bool is_bulk_multiple(std::int64_t bytes) { return bytes % bulk_alignment_bytes == 0; }

bool rows_suit_bulk(const ConstTensorView& view, std::int64_t row_bytes) {
  if (view.shape[0] == 0) return true;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(view.data));
  return is_bulk_multiple(address) && is_bulk_multiple(row_bytes) &&
         (view.shape[0] == 1 || is_bulk_multiple(pitch_of(view)));
}

/// The meaning of the call on this rank, with the plan's part in the device's memory.
FingerprintParams fingerprint_params(const SequenceCall& call) {
  FingerprintParams params{};
  std::ranges::copy(pack_fingerprint(call.fingerprint), params.words);
  params.first_slot =
      static_cast<std::int32_t>(first_fingerprint_slot(num_arrival_signals(call.plan->world_size)));
  params.crosses_nodes = true;  // with the network path
  return params;
}

/// The part of the parameters by which ranks synchronize.
ArriveParams arrive_params(const SequenceCall& call, const GpuRank& gpu, FaultKind kind,
                           int share) {
  const std::int32_t world = call.plan->world_size;
  ArriveParams params{};
  params.rank = to_int(call.plan->rank);
  params.world_size = world;
  params.parity = static_cast<std::uint32_t>(call.epoch % 2);
  params.kind = kind;
  params.state = reinterpret_cast<CallState*>(call.arrivals->local + world);
  params.sink = gpu.sink(share);
  params.own_arrivals = call.arrivals->local;
  params.node_ranks = gpu.topology().ranks_per_node;
  params.first_rank = params.rank / params.node_ranks * params.node_ranks;
  params.arrivals = near_peers_of<std::uint64_t>(*call.arrivals, 0, 0, world);
  params.fingerprint = fingerprint_params(call);
  return params;
}

/// Returns everything but the plan's tables.
SequenceParams sequence_params(const SequenceCall& call, const GpuRank& gpu, FaultKind kind,
                               int share) {
  SequenceParams params{};
  params.arrive = arrive_params(call, gpu, kind, share);
  params.own_window = call.window->local;
  params.windows = near_peers_of<std::byte>(*call.window, 0, 0, call.plan->world_size);
  if (call.slots != nullptr) {
    params.own_slots = call.slots->local;
    params.slots = near_peers_of<std::uint64_t>(*call.slots, 0, 0, call.plan->world_size);
  }
  for (std::size_t t = 0; t < call.inputs.size(); ++t) {
    // Kernels only read the inputs.
    params.inputs[t] = {const_cast<std::byte*>(call.inputs[t].data), pitch_of(call.inputs[t])};
  }
  for (std::size_t t = 0; t < call.outputs.size(); ++t) {
    params.outputs[t] = {call.outputs[t].data, pitch_of(call.outputs[t])};
  }
  return params;
}

/// Whether the rows of all tensors lie as bulk copies need them.
bool suits_bulk(const SequenceCall& call) {
  const bool sends = call.plan->operation == SequenceOperation::dispatch;
  for (std::size_t t = 0; t < call.plan->tensors.size(); ++t) {
    const std::int64_t row_bytes = call.plan->tensors[t].row_bytes();
    // A sum is read from windows, whose tensors are aligned, and written with 16-byte words.
    // A rank without rows of its own may forward some.
    const bool forwards = !call.plan->batches.empty();
    const bool good =
        sends ? rows_suit_bulk(call.inputs[t], row_bytes) &&
                    (!forwards || is_bulk_multiple(row_bytes))
              : rows_suit_bulk(call.outputs[t], row_bytes) && is_bulk_multiple(row_bytes);
    if (!good) return false;
  }
  return true;
}

class GpuExecutor final : public Executor, public ExpertExecutorFactory {
 public:
  GpuExecutor(Transport& transport, std::shared_ptr<GpuRank> gpu, int share,
              std::unique_ptr<NetworkPath> path)
      : transport_(transport),
        gpu_(std::move(gpu)),
        share_(share),
        pool_(std::make_shared<PlanPool>(gpu_)),
        copy_engine_(gpu_, share),
        path_(std::move(path)) {
    gpu_->use();
    cuda_check(prepare_expand_plan(), "loading kernels");
    cuda_check(prepare_dispatch_vector(), "loading kernels");
    cuda_check(prepare_widen_rows(), "loading kernels");
    cuda_check(prepare_kv_gradient(false), "loading kernels");
    if (!gpu_->has_bulk_copies()) return;
    cuda_check(prepare_dispatch_tma(), "loading kernels");
    cuda_check(prepare_kv_gradient(true), "loading kernels");
  }

  [[nodiscard]] bool expands_plans() const override { return true; }
  [[nodiscard]] bool runs_batches() const override { return true; }
  [[nodiscard]] bool splits_network() const override { return true; }
  [[nodiscard]] bool is_two_sided() const override {
    return path_ != nullptr && path_->needs_phases();
  }

  [[nodiscard]] std::string device_name() const override { return gpu_->device_name(); }

  std::unique_ptr<UploadedPlan> upload(const SequencePlan& plan, Stream stream) override {
    gpu_->use();
    auto uploaded = std::make_unique<GpuPlan>(pool_, gpu_, plan);
    uploaded->fill(plan, stream_of(stream));
    return uploaded;
  }

  void refill(UploadedPlan& uploaded, const SequencePlan& plan, Stream stream) override {
    gpu_->use();
    static_cast<GpuPlan&>(uploaded).fill(plan, stream_of(stream));
  }

  void dispatch(const SequenceCall& call) override {
    begin();
    if (call.num_sms == 0) {
      ArriveParams arrive = arrive_params(call, *gpu_, FaultKind::dispatch, share_);
      arrive.fingerprint.plan = plan_of(call).fingerprint();
      copy_engine_.send(call, false);
      copy_engine_.join(call);
      gpu_->check(launch_arrive_and_wait(arrive, stream_of(call.stream)), "launching a kernel",
                  call.operation);
      plan_of(call).note_copies(capture(call.stream) != 0);
      plan_of(call).note_use(stream_of(call.stream));  // ranks compare what the plan's head says
      return;
    }
    SequenceParams params = sequence_params(call, *gpu_, FaultKind::dispatch, share_);
    plan_of(call).point(params);
    const bool bulk = gpu_->has_bulk_copies() && suits_bulk(call) &&
                      call.plan->chunk_bytes <= max_bulk_chunk_bytes;
    // The copy engine moves what stays here, so that the multiprocessors have the links alone.
    if (has_local_copies(call)) copy_engine_.send(call, true);
    start_path(call, FaultKind::dispatch, PathArrival::last);
    const auto launch = bulk ? launch_dispatch_tma : launch_dispatch_vector;
    const bool batched = plan_of(call).batched();
    gpu_->check(launch(params, batched, num_sms(call), stream_of(call.stream)),
                "launching a kernel", call.operation);
    finish(call);
  }

  void kv_gradient(const SequenceCall& call) override {
    begin();
    SequenceParams params = sequence_params(call, *gpu_, FaultKind::kv_gradient, share_);
    plan_of(call).point(params);
    stage(call);  // first: the engine that copies would do it last, and other ranks wait for it
    if (has_local_copies(call)) copy_engine_.return_local(call, num_sms(call));
    const bool any = !call.plan->tensors.empty();
    const DType from = any ? call.plan->tensors[0].dtype : DType::float32;
    const DType to = any ? call.outputs[0].dtype : DType::float32;
    const bool bulk = gpu_->has_bulk_copies() && suits_bulk(call);
    // Its puts read what stage() has brought; its rank has come with that.
    start_path(call, FaultKind::kv_gradient, PathArrival::first);
    gpu_->check(launch_kv_gradient(params, from, to, bulk, plan_of(call).batched(), num_sms(call),
                                   stream_of(call.stream)),
                "launching a kernel", call.operation);
    finish(call);
  }

  std::unique_ptr<ExpertExecutor> make_expert_executor(const EPConfig& config,
                                                       const EPDispatchOptions& options,
                                                       const ExpertMemory& memory) override {
    return make_gpu_expert_executor(transport_, gpu_, share_, path_.get(), config, options, memory);
  }

  std::unique_ptr<CopyStoreExecutor> make_copy_store(std::int64_t size_bytes,
                                                     std::int32_t spare_experts,
                                                     std::string_view name) override {
    return make_gpu_copy_store(transport_, gpu_, share_, path_.get(), size_bytes, spare_experts,
                               name);
  }

  void synchronize(Stream stream) override {
    gpu_->use();
    gpu_->wait_for(stream_of(stream), "waiting for a stream", "synchronize");
    gpu_->throw_fault();
  }

  void finish() override {
    gpu_->use();
    gpu_->wait_for_device("waiting for a device", "close");
    gpu_->throw_fault();
  }

  [[nodiscard]] std::uint64_t capture(Stream stream) const override {
    gpu_->use();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    gpu_->check(cudaStreamGetCaptureInfo(stream_of(stream), &status, &capture),
                "asking about a capture", "dispatch");
    return status == cudaStreamCaptureStatusNone ? 0 : capture;
  }

  void realign(const SequenceCall& call) override {
    if (path_ != nullptr) return;
    begin();
    const bool sends = call.plan->operation == SequenceOperation::dispatch;
    SequenceCall empty = call;
    empty.fingerprint = {.call = CollectiveCall::realign};
    const ArriveParams arrive =
        arrive_params(empty, *gpu_, sends ? FaultKind::dispatch : FaultKind::kv_gradient, share_);
    gpu_->check(launch_realign(arrive, stream_of(call.stream)), "launching a kernel",
                call.operation);
  }

 private:
  static const GpuPlan& plan_of(const SequenceCall& call) {
    return static_cast<const GpuPlan&>(*call.uploaded);
  }

  /// Rows that stay here, which the copy engine moves.
  [[nodiscard]] static bool has_local_copies(const SequenceCall& call) {
    return !call.plan->local_segments.empty();
  }

  void begin() const {
    gpu_->use();
    gpu_->throw_fault();
  }

  /// Ranks on one device must fit on it together, as they wait for each other. Copy engines add
  /// nothing up: a gradient takes the usual number where none is given.
  [[nodiscard]] int all_sms(const SequenceCall& call) const {
    constexpr int usual = SequenceDispatcherOptions{}.num_sms;
    const int wanted = call.num_sms == 0 ? usual : call.num_sms;
    return std::max(1, std::min(wanted, gpu_->num_sms() / share_));
  }

  /// The network path has some of these, at least one: a quarter keeps up with a network.
  [[nodiscard]] int path_sms(const SequenceCall& call) const {
    return path_ == nullptr ? 0 : std::clamp(all_sms(call) / 4, 1, 8);
  }
  [[nodiscard]] int num_sms(const SequenceCall& call) const {
    return std::max(1, all_sms(call) - path_sms(call));
  }

  void start_path(const SequenceCall& call, FaultKind kind, PathArrival arrival) const {
    if (path_ == nullptr) return;
    const std::int32_t world = call.plan->world_size;
    FingerprintParams fingerprint = fingerprint_params(call);
    fingerprint.plan = plan_of(call).fingerprint();
    constexpr std::int64_t words = sizeof(CallState) / sizeof(std::uint64_t);
    static_assert(sizeof(CallState) + sizeof(PathState) <=
                  num_executor_slots * sizeof(std::uint64_t));
    path_->start({.operation = call.operation,
                  .kind = kind,
                  .arrival = arrival,
                  .tables = plan_of(call).path_tables(),
                  .state = reinterpret_cast<PathState*>(call.arrivals->local + world + words),
                  .phases = call.plan->phases,
                  .window = call.window,
                  .slots = call.slots,
                  .first_slot = world,
                  .arrivals = call.arrivals,
                  .fingerprint = fingerprint,
                  .epoch = call.epoch,
                  .num_sms = path_sms(call),
                  .stream = stream_of(call.stream)});
  }

  void join_path(const SequenceCall& call) const {
    if (path_ == nullptr) return;
    path_->join(stream_of(call.stream));
    if (path_->needs_phases()) plan_of(call).note_copies(capture(call.stream) != 0);
  }

  /// Waits on the stream for copies and puts that run during the kernel.
  void finish(const SequenceCall& call) {
    join_path(call);
    if (has_local_copies(call)) {
      copy_engine_.join(call);
      plan_of(call).note_copies(capture(call.stream) != 0);
    }
    plan_of(call).note_use(stream_of(call.stream));
  }

  /// Gradients into this rank's window, where sums read them.
  void stage(const SequenceCall& call) const {
    for (const RowSegment& staged : call.plan->staged) {
      const std::size_t t = staged.tensor;
      const ConstTensorView& input = call.inputs[t];
      const std::int64_t row_bytes = call.plan->tensors[t].row_bytes();
      const std::int64_t pitch = pitch_of(input);
      const std::byte* const from = input.data + staged.row * pitch;
      std::byte* const to =
          call.window->local + call.plan->window_offsets[t] + staged.row * row_bytes;
      if (from == to && pitch == row_bytes) continue;
      const cudaStream_t stream = stream_of(call.stream);
      const cudaError_t status =
          pitch == row_bytes
              ? cudaMemcpyAsync(to, from, staged.rows * row_bytes, cudaMemcpyDeviceToDevice, stream)
              : cudaMemcpy2DAsync(to, row_bytes, from, pitch, row_bytes, staged.rows,
                                  cudaMemcpyDeviceToDevice, stream);
      gpu_->check(status, "copying gradients", call.operation);
    }
  }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  int share_;
  std::shared_ptr<PlanPool> pool_;
  CopyEngine copy_engine_;
  std::unique_ptr<NetworkPath> path_;  ///< with several nodes
};

}  // namespace

std::unique_ptr<Executor> make_gpu_executor(Transport& transport, std::shared_ptr<GpuRank> gpu,
                                            int share, std::unique_ptr<NetworkPath> path) {
  return std::make_unique<GpuExecutor>(transport, std::move(gpu), share, std::move(path));
}

}  // namespace waybill::cuda
