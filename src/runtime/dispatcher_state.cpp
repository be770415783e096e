#include "dispatcher_state.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "call_checks.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t least_window_bytes = std::int64_t{1} << 20;
constexpr std::int64_t large_window_bytes = std::int64_t{1} << 28;

/// The documented rule: powers of two, and multiples of 256 MiB above that.
std::int64_t grown_size(std::int64_t need, std::int64_t most) {
  std::int64_t size = std::max(need, least_window_bytes);
  if (size <= large_window_bytes) {
    size = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(size)));
  } else {
    size = (size + large_window_bytes - 1) / large_window_bytes * large_window_bytes;
  }
  return std::max(need, std::min(size, most));
}

/// Counters for notes and for slots of batches, in powers of two.
std::int64_t pad_size(std::int32_t world_size, std::int32_t num_slots) {
  const auto slots = std::max(num_slots, least_batch_slots);
  return std::int64_t{world_size} *
         (1 + static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint32_t>(slots))));
}

/// Options by which all ranks compile and check plans of all.
std::vector<Setting> common_settings(const SequenceDispatcherOptions& options) {
  std::vector<Setting> settings{{"max_window_bytes", concat(options.max_window_bytes)}};
  for_common_options(options.plan, [&](const char* name, auto value) {
    settings.push_back({name, concat(value)});
  });
  return settings;
}

/// The world's speeds, unless the options have others than the defaults.
SequenceDispatcherOptions with_links(SequenceDispatcherOptions options, const World& world) {
  constexpr LinkSpeeds usual;
  SequencePlanOptions& plan = options.plan;
  if (plan.nvlink_bytes_per_second != usual.nvlink_bytes_per_second ||
      plan.network_bytes_per_second != usual.network_bytes_per_second) {
    return options;
  }
  plan.nvlink_bytes_per_second = world.links().nvlink_bytes_per_second;
  plan.network_bytes_per_second = world.links().network_bytes_per_second;
  return options;
}

/// What the executor of the world can do, and what its plans are compiled for.
CompileOptions options_of_plans(const SequenceDispatcherOptions& options, const World& world) {
  const Executor& executor = world.executor();
  const bool batches = executor.runs_batches();
  // Copy engines forward nothing.
  const bool forwards = batches && (options.num_sms != 0 || !executor.expands_plans());
  CompileOptions compile{.plan = options.plan};
  compile.chunks = !executor.expands_plans();
  compile.separate_local_copies = options.local_by_copy_engine && executor.expands_plans();
  compile.num_sms = options.num_sms;
  compile.ranks_per_node = batches ? world.topology().ranks_per_node : 0;
  if (!forwards) compile.plan.relay = RelayUse::never;
  compile.split_network = batches && executor.splits_network();
  compile.two_sided_network = batches && executor.is_two_sided();
  return compile;
}

}  // namespace

DispatcherState::DispatcherState(const World& world, const SequenceDispatcherOptions& options)
    : world_(world),
      options_(with_links(options, world)),
      compile_(options_of_plans(options_, world)) {
  options_.plan.relay = compile_.plan.relay;
  agree_on_settings(world.transport(), "SequenceDispatcher", [&] {
    require(options.num_sms >= 0, "SequenceDispatcher: num_sms = ", options.num_sms,
            ", expected >= 0");
    const std::int32_t nodes = world.topology().num_nodes();
    require(options.num_sms > 0 || nodes == 1 || !world.executor().expands_plans(),
            "SequenceDispatcher: num_sms = 0 on ", nodes,
            " nodes, expected at least 1: copy engines wait for nobody");
    require(options.plan.relay != RelayUse::always || compile_.plan.relay == RelayUse::always,
            "SequenceDispatcher: relay = always with num_sms = ", options.num_sms,
            ", expected at least 1: copy engines forward nothing");
    require(options.max_window_bytes >= 0,
            "SequenceDispatcher: max_window_bytes = ", options.max_window_bytes, ", expected >= 0");
    return common_settings(options_);
  });
  name_ = concat(" of dispatcher ", world.next_object());
  const std::int32_t ranks = world.world_size();
  arrivals_ = world.transport().allocate_signals(
      with_fingerprints(num_arrival_signals(ranks), ranks), "arrivals" + name_);
  slots_ = world.transport().allocate_signals(pad_size(world.world_size(), least_batch_slots),
                                              "slots of batches" + name_);
}

DispatcherState::~DispatcherState() {
  Transport& transport = world_.transport();
  for (SymmetricBuffer& window : windows_) transport.defer_release(std::move(window.memory));
  for (SymmetricBuffer& buffer : retired_) transport.defer_release(std::move(buffer.memory));
  for (SignalPad& pad : old_slots_) transport.defer_release(std::move(pad.memory));
  transport.defer_release(std::move(slots_.memory));
  transport.defer_release(std::move(arrivals_.memory));
}

void DispatcherState::close() {
  if (arrivals_.local == nullptr) return;
  abort_state_.check("close");
  abort_state_.guard([&] {
    world_.executor().finish();
    Transport& transport = world_.transport();
    for (SymmetricBuffer& window : windows_) retired_.push_back(std::exchange(window, {}));
    for (SymmetricBuffer& buffer : retired_) transport.release(buffer);
    retired_.clear();
    for (SignalPad& pad : old_slots_) transport.release(pad);
    old_slots_.clear();
    transport.release(slots_);
    transport.release(arrivals_);
  });
  abort_state_.end("was closed");
}

PlanHandle DispatcherState::ready(SequencePlan plan, Stream stream) {
  PlanHandle result;
  result.plan_ = std::make_unique<SequencePlan>(std::move(plan));
  result.uploaded_ = world_.executor().upload(*result.plan_, stream);
  return result;
}

void DispatcherState::check_world(const char* who, std::span<const SequencePart> parts) const {
  for (const SequencePart& part : parts) {
    if (part.metadata == nullptr || part.metadata->world_size == world_.world_size()) continue;
    throw InvalidArgument(concat(who, ": the plan is for ", part.metadata->world_size,
                                 " ranks, expected ", world_.world_size(), ", as the world has"));
  }
}

PlanHandle DispatcherState::plan_dispatch(std::span<const SequencePart> parts, Stream stream) {
  check_world("plan_dispatch", parts);
  return ready(compile_dispatch(parts, world_.rank(), compile_), stream);
}

PlanHandle DispatcherState::plan_kv_gradient(std::span<const SequencePart> parts, Stream stream) {
  check_world("plan_kv_gradient", parts);
  return ready(compile_kv_gradient(parts, world_.rank(), compile_), stream);
}

void DispatcherState::replace_plan(PlanHandle& ready, std::span<const SequencePart> parts,
                                   Stream stream) {
  constexpr const char* who = "replace_plan";
  require(ready.uploaded_ != nullptr, who, ": the plan is empty");
  check_world(who, parts);
  const SequencePlan& old = *ready.plan_;
  CompileOptions options = compile_;
  options.separate_local_copies =
      !old.local_segments.empty();  // a captured launch does one or the other
  SequencePlan plan = old.operation == SequenceOperation::dispatch
                          ? compile_dispatch(parts, world_.rank(), options)
                          : compile_kv_gradient(parts, world_.rank(), options);
  require(plan.tensors == old.tensors, who, ": parts have other formats than the plan");
  require(plan.window_bytes <= window_bytes(), who, ": the plan needs windows of ",
          plan.window_bytes, " bytes, expected at most ", window_bytes(), ": reserve() more");
  require(pad_size(world_.world_size(), plan.num_slots) <= slots_.count, who, ": the plan has ",
          plan.num_slots, " slots of batches, expected at most ",
          slots_.count / world_.world_size() - 1, ": reserve() more");
  world_.executor().refill(*ready.uploaded_, plan, stream);
  *ready.plan_ = std::move(plan);
}

void DispatcherState::check_call(const char* who, const PlanHandle& ready,
                                 SequenceOperation operation) const {
  abort_state_.check(who);
  require(ready.uploaded_ != nullptr, who, ": the plan is empty");
  const SequencePlan& plan = *ready.plan_;
  require(plan.operation == operation, who, ": the plan is for the other operation");
  require(plan.world_size == world_.world_size() && plan.rank == world_.rank(), who,
          ": the plan is for rank ", plan.rank, " of ", plan.world_size, ", expected rank ",
          world_.rank(), " of ", world_.world_size());
  require(plan.window_bytes <= options_.max_window_bytes, who, ": the plan needs windows of ",
          plan.window_bytes,
          " bytes, expected at most max_window_bytes = ", options_.max_window_bytes);
}

void DispatcherState::retire() {
  if (retired_epoch_ == epoch_) return;  // they may hold the last output
  for (SymmetricBuffer& buffer : retired_) world_.transport().release(buffer);
  retired_.clear();
  for (SignalPad& pad : old_slots_) world_.transport().release(pad);
  old_slots_.clear();
}

void DispatcherState::grow_for(const char* who, std::int64_t window_bytes, std::int32_t num_slots,
                               Stream stream) {
  Executor& executor = world_.executor();
  const bool capturing = executor.capture(stream) != 0;
  const bool windows = window_bytes > windows_[0].size_bytes || windows_[0].local == nullptr;
  const std::int64_t counters = pad_size(world_.world_size(), num_slots);
  if (!windows && counters <= slots_.count) return;
  require(!capturing, who, ": windows of ", window_bytes, " bytes and ", num_slots,
          " slots of batches, but they have ", windows_[0].size_bytes, " and ",
          slots_.count / world_.world_size() - 1,
          " and cannot grow inside a graph: reserve() before");
  executor.synchronize(stream);
  retire();
  if (windows) {
    const std::int64_t size = grown_size(window_bytes, options_.max_window_bytes);
    for (SymmetricBuffer& window : windows_) {
      SymmetricBuffer larger = world_.transport().allocate(size, "window" + name_);
      if (window.local != nullptr) retired_.push_back(std::move(window));
      window = std::move(larger);
    }
  }
  if (counters > slots_.count) {
    old_slots_.push_back(std::move(slots_));
    slots_ = world_.transport().allocate_signals(counters, "slots of batches" + name_);
  }
  retired_epoch_ = epoch_;
}

void DispatcherState::reserve(std::int64_t window_bytes, Stream stream, std::int32_t num_slots) {
  require(0 <= window_bytes && window_bytes <= options_.max_window_bytes,
          "reserve: window_bytes = ", window_bytes, ", expected 0..", options_.max_window_bytes);
  require(0 <= num_slots && num_slots <= (1 << 24), "reserve: num_slots = ", num_slots,
          ", expected 0..2^24");
  abort_state_.check("reserve");
  abort_state_.guard([&] { grow_for("reserve", window_bytes, num_slots, stream); });
}

std::vector<TensorView> DispatcherState::window_views(const SequencePlan& plan,
                                                      std::uint64_t epoch) {
  std::vector<TensorView> views;
  for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
    views.emplace_back(window_of(epoch).local + plan.window_offsets[t], plan.tensors[t].dtype,
                       Shape{plan.window_rows[t], plan.tensors[t].hidden});
  }
  return views;
}

SequenceCall DispatcherState::next_call(const char* who, const PlanHandle& ready,
                                        std::span<const ConstTensorView> inputs,
                                        std::span<const TensorView> outputs, Stream stream,
                                        std::uint64_t of_dispatch) {
  return {.operation = who,
          .plan = ready.plan_.get(),
          .uploaded = ready.uploaded_.get(),
          .inputs = inputs,
          .outputs = outputs,
          .window = &window_of(epoch_ + 1),
          .arrivals = &arrivals_,
          .slots = &slots_,
          .epoch = epoch_ + 1,
          .fingerprint = {.call = ready.plan_->operation == SequenceOperation::dispatch
                                      ? CollectiveCall::dispatch
                                      : CollectiveCall::kv_gradient,
                          .origin = static_cast<std::uint32_t>(of_dispatch),
                          .plan = ready.plan_->fingerprint,
                          .formats = ready.plan_->formats},
          .num_sms = options_.num_sms,
          .stream = stream};
}

void DispatcherState::realign(const SequenceCall& call) {
  Executor& executor = world_.executor();
  if (captures_.may_be_off(executor.capture(call.stream))) executor.realign(call);
}

std::vector<TensorView> DispatcherState::dispatch(const PlanHandle& ready,
                                                  std::span<const ConstTensorView> tensors,
                                                  Stream stream, std::uint64_t of_dispatch) {
  constexpr const char* who = "dispatch";
  check_call(who, ready, SequenceOperation::dispatch);
  check_inputs(who, *ready.plan_, tensors);
  abort_state_.guard([&] {
    grow_for(who, ready.plan_->window_bytes, ready.plan_->num_slots, stream);
    const SequenceCall call = next_call(who, ready, tensors, {}, stream, of_dispatch);
    realign(call);
    world_.executor().dispatch(call);
    captures_.count();
    ++epoch_;
    ++num_dispatches_;
  });
  return window_views(*ready.plan_, epoch_);
}

void DispatcherState::kv_gradient(const PlanHandle& ready,
                                  std::span<const ConstTensorView> gradients,
                                  std::span<const TensorView> outputs, Stream stream,
                                  std::uint64_t of_dispatch) {
  constexpr const char* who = "kv_gradient";
  check_call(who, ready, SequenceOperation::kv_gradient);
  check_inputs(who, *ready.plan_, gradients);
  check_outputs(who, *ready.plan_, outputs);
  abort_state_.guard([&] {
    grow_for(who, ready.plan_->window_bytes, ready.plan_->num_slots, stream);
    const SequenceCall call = next_call(who, ready, gradients, outputs, stream, of_dispatch);
    realign(call);
    world_.executor().kv_gradient(call);
    captures_.count();
    ++epoch_;
  });
}

std::vector<TensorView> DispatcherState::gradient_inputs(const PlanHandle& ready, Stream stream) {
  constexpr const char* who = "gradient_inputs";
  check_call(who, ready, SequenceOperation::kv_gradient);
  abort_state_.guard([&] {
    grow_for(who, ready.plan_->window_bytes, ready.plan_->num_slots, stream);
    realign(next_call(who, ready, {}, {}, stream, 0));  // now, as the caller writes there
  });
  return window_views(*ready.plan_, epoch_ + 1);
}

std::vector<std::shared_ptr<void>> DispatcherState::window_memory() const {
  std::vector<std::shared_ptr<void>> memory = windows_[0].memory;
  memory.insert(memory.end(), windows_[1].memory.begin(), windows_[1].memory.end());
  return memory;
}

void DispatcherState::synchronize(Stream stream) {
  abort_state_.guard([&] { world_.executor().synchronize(stream); });
}

}  // namespace waybill::detail
