#include "waybill/runtime/sequence_dispatcher.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "runtime/abort_state.h"
#include "runtime/capture_log.h"
#include "runtime/executor.h"
#include "schedule/sequence_plan.h"
#include "transport/transport.h"
#include "waybill/core/error.h"

namespace waybill {

const SequencePlan& detail::compiled_plan(const PlanHandle& handle) noexcept {
  static const SequencePlan none;
  return handle.plan_ == nullptr ? none : *handle.plan_;
}

namespace {
constexpr auto& of = detail::compiled_plan;
}

PlanHandle::PlanHandle() noexcept = default;
PlanHandle::PlanHandle(PlanHandle&&) noexcept = default;
PlanHandle& PlanHandle::operator=(PlanHandle&&) noexcept = default;
PlanHandle::~PlanHandle() = default;

SequenceOperation PlanHandle::operation() const noexcept { return of(*this).operation; }
std::span<const TensorFormat> PlanHandle::tensors() const noexcept { return of(*this).tensors; }
std::span<const std::int64_t> PlanHandle::own_rows() const noexcept { return of(*this).own_rows; }
std::span<const std::int64_t> PlanHandle::window_rows() const noexcept {
  return of(*this).window_rows;
}
std::span<const std::int64_t> PlanHandle::window_offsets() const noexcept {
  return std::span(of(*this).window_offsets).first(tensors().size());
}
std::int64_t PlanHandle::window_bytes() const noexcept { return of(*this).window_bytes; }
std::int32_t PlanHandle::num_slots() const noexcept { return of(*this).num_slots; }
std::span<const std::int64_t> PlanHandle::wire_bytes() const noexcept {
  return of(*this).wire_bytes;
}
const PlanLimits& PlanHandle::limits() const noexcept { return of(*this).limits; }

namespace {

constexpr std::int64_t min_window_bytes = std::int64_t{1} << 20;
constexpr std::int64_t large_window_bytes = std::int64_t{1} << 28;

/// The documented rule: powers of two, and multiples of 256 MiB above that.
std::int64_t grown_size(std::int64_t need, std::int64_t max_bytes) {
  std::int64_t size = std::max(need, min_window_bytes);
  if (size <= large_window_bytes) {
    size = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(size)));
  } else {
    size = (size + large_window_bytes - 1) / large_window_bytes * large_window_bytes;
  }
  return std::max(need, std::min(size, max_bytes));
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

/// Plans are compiled for what the executor of the world can do.
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

template <class Byte>
void check_rows(const char* who, const char* name, std::span<const BasicTensorView<Byte>> views,
                const SequencePlan& plan, std::span<const std::int64_t> rows) {
  require(views.size() == plan.tensors.size(), who, ": got ", views.size(), " ", name,
          ", expected ", plan.tensors.size(), ", as many as the plan");
  for (std::size_t t = 0; t < views.size(); ++t) {
    const BasicTensorView<Byte>& view = views[t];
    const std::int64_t hidden = plan.tensors[t].hidden;
    require(view.ndim() == 2 && view.strides.size() == 2 && view.shape[0] >= 0 &&
                view.shape[1] == hidden,
            who, ": ", name, "[", t, "] has shape ", to_string(view.shape), ", expected [rows, ",
            hidden, "], as in the plan");
    require(view.strides[1] == 1 || hidden <= 1, who, ": ", name, "[", t, "] has strides ",
            to_string(view.strides), ", expected adjacent elements in a row");
    require(view.data != nullptr || view.shape[0] == 0 || hidden == 0, who, ": ", name, "[", t,
            "] is null");
    require(view.shape[0] >= rows[t], who, ": ", name, "[", t, "] has shape ",
            to_string(view.shape), ", expected at least ", rows[t], " rows");
  }
}

void check_inputs(const char* who, const char* name, const SequencePlan& plan,
                  std::span<const ConstTensorView> inputs) {
  const bool sends = plan.operation == SequenceOperation::dispatch;
  check_rows(who, name, inputs, plan, sends ? plan.own_rows : plan.window_rows);
  for (std::size_t t = 0; t < inputs.size(); ++t) {
    require(inputs[t].dtype == plan.tensors[t].dtype, who, ": ", name, "[", t, "] has dtype ",
            inputs[t].dtype, ", expected ", plan.tensors[t].dtype, ", as in the plan");
  }
}

void check_outputs(const char* who, const SequencePlan& plan, std::span<const TensorView> outputs) {
  check_rows(who, "out", outputs, plan, plan.own_rows);
  for (std::size_t t = 0; t < outputs.size(); ++t) {
    require(can_sum(plan.tensors[t].dtype, outputs[t].dtype), who, ": out[", t, "] has dtype ",
            outputs[t].dtype, ", expected ", plan.tensors[t].dtype,
            " as the gradients, or float32 for 16-bit ones");
    require(outputs[t].dtype == outputs[0].dtype, who, ": out has dtypes ", outputs[0].dtype,
            " and ", outputs[t].dtype, ", expected one");
  }
}

void check_options(const SequenceDispatcherOptions& options, const CompileOptions& compile,
                   const World& world) {
  constexpr const char* who = "SequenceDispatcher";
  require(options.num_sms >= 0, who, ": num_sms = ", options.num_sms, ", expected >= 0");
  const std::int32_t nodes = world.topology().num_nodes();
  require(options.num_sms > 0 || nodes == 1 || !world.executor().expands_plans(), who,
          ": num_sms = 0 on ", nodes, " nodes, expected at least 1: copy engines wait for nobody");
  require(options.plan.relay != RelayUse::always || compile.plan.relay == RelayUse::always, who,
          ": relay = always with num_sms = ", options.num_sms,
          ", expected at least 1: copy engines forward nothing");
  const std::int64_t chunk_bytes = options.plan.chunk_bytes;
  require(16 <= chunk_bytes && chunk_bytes < 1 << 30 && chunk_bytes % 16 == 0, who,
          ": chunk_bytes = ", chunk_bytes, ", expected a multiple of 16, up to 2^30");
  require(options.max_window_bytes >= 0, who, ": max_window_bytes = ", options.max_window_bytes,
          ", expected >= 0");
}

/// The options of all plans, when all ranks have the same. Options that are refused end no world,
/// as no memory is there yet.
/// @param options get the relay that is used
CompileOptions agreed_compile_options(const SequenceDispatcherOptions& given,
                                      SequenceDispatcherOptions& options, const World& world) {
  CompileOptions compile = options_of_plans(options, world);
  options.plan.relay = compile.plan.relay;
  agree_on_settings(world.transport(), "SequenceDispatcher", [&] {
    check_options(given, compile, world);
    return common_settings(options);
  });
  return compile;
}

}  // namespace

struct SequenceDispatcher::State {
  State(const World& its_world, const SequenceDispatcherOptions& given)
      : world(its_world),
        options(with_links(given, world)),
        compile(agreed_compile_options(given, options, world)) {
    name = concat(" of dispatcher ", world.next_object());
    const std::int32_t ranks = world.world_size();
    arrivals = world.transport().allocate_signals(
        with_fingerprints(num_arrival_signals(ranks), ranks), "arrivals" + name);
    slots = world.transport().allocate_signals(pad_size(ranks, least_batch_slots),
                                               "slots of batches" + name);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    Transport& transport = world.transport();
    for (SymmetricBuffer& window : windows) transport.defer_release(std::move(window.memory));
    for (SymmetricBuffer& buffer : retired) transport.defer_release(std::move(buffer.memory));
    for (SignalPad& pad : old_slots) transport.defer_release(std::move(pad.memory));
    transport.defer_release(std::move(slots.memory));
    transport.defer_release(std::move(arrivals.memory));
  }

  void check_world(const char* who, std::span<const SequencePart> parts) const {
    for (const SequencePart& part : parts) {
      if (part.metadata == nullptr || part.metadata->world_size == world.world_size()) continue;
      throw InvalidArgument(concat(who, ": the plan is for ", part.metadata->world_size,
                                   " ranks, expected ", world.world_size(), ", as the world has"));
    }
  }

  [[nodiscard]] PlanHandle handle_of(SequencePlan plan, Stream stream) const {
    PlanHandle result;
    result.plan_ = std::make_unique<SequencePlan>(std::move(plan));
    result.uploaded_ = world.executor().upload(*result.plan_, stream);
    return result;
  }

  void check_call(const char* who, const PlanHandle& ready, SequenceOperation operation) const {
    abort_state.check(who);
    require(ready.uploaded_ != nullptr, who, ": the plan is empty");
    const SequencePlan& plan = *ready.plan_;
    require(plan.operation == operation, who, ": the plan is for ",
            plan.operation == SequenceOperation::dispatch ? "dispatch" : "kv_gradient");
    require(plan.world_size == world.world_size() && plan.rank == world.rank(), who,
            ": the plan is for rank ", plan.rank, " of ", plan.world_size, ", expected rank ",
            world.rank(), " of ", world.world_size());
    require(plan.window_bytes <= options.max_window_bytes, who, ": the plan needs windows of ",
            plan.window_bytes,
            " bytes, expected at most max_window_bytes = ", options.max_window_bytes);
  }

  void release_retired() {
    if (retired_epoch == epoch) return;  // they may hold the last output
    for (SymmetricBuffer& buffer : retired) world.transport().release(buffer);
    retired.clear();
    for (SignalPad& pad : old_slots) world.transport().release(pad);
    old_slots.clear();
  }

  void grow_for(const char* who, std::int64_t window_bytes, std::int32_t num_slots, Stream stream) {
    Executor& executor = world.executor();
    const bool capturing = executor.capture(stream) != 0;
    const bool grows = window_bytes > windows[0].size_bytes || windows[0].local == nullptr;
    const std::int64_t counters = pad_size(world.world_size(), num_slots);
    if (!grows && counters <= slots.count) return;
    require(!capturing, who, ": windows of ", window_bytes, " bytes and ", num_slots,
            " slots of batches, but they have ", windows[0].size_bytes, " and ",
            slots.count / world.world_size() - 1,
            " and cannot grow inside a graph: reserve() before");
    executor.synchronize(stream);
    release_retired();
    if (grows) {
      const std::int64_t size = grown_size(window_bytes, options.max_window_bytes);
      for (SymmetricBuffer& window : windows) {
        SymmetricBuffer larger = world.transport().allocate(size, "window" + name);
        if (window.local != nullptr) retired.push_back(std::move(window));
        window = std::move(larger);
      }
    }
    if (counters > slots.count) {
      old_slots.push_back(std::move(slots));
      slots = world.transport().allocate_signals(counters, "slots of batches" + name);
    }
    retired_epoch = epoch;
  }

  [[nodiscard]] SymmetricBuffer& window_of(std::uint64_t call) { return windows[call % 2]; }

  [[nodiscard]] std::vector<TensorView> window_views(const SequencePlan& plan, std::uint64_t call) {
    std::vector<TensorView> views;
    for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
      views.emplace_back(window_of(call).local + plan.window_offsets[t], plan.tensors[t].dtype,
                         Shape{plan.window_rows[t], plan.tensors[t].hidden});
    }
    return views;
  }

  [[nodiscard]] SequenceCall next_call(const char* who, const PlanHandle& ready,
                                       std::span<const ConstTensorView> inputs,
                                       std::span<const TensorView> outputs, Stream stream,
                                       std::uint64_t of_dispatch) {
    const bool sends = ready.plan_->operation == SequenceOperation::dispatch;
    return {.operation = who,
            .plan = ready.plan_.get(),
            .uploaded = ready.uploaded_.get(),
            .inputs = inputs,
            .outputs = outputs,
            .window = &window_of(epoch + 1),
            .arrivals = &arrivals,
            .slots = &slots,
            .epoch = epoch + 1,
            .fingerprint = {.call = sends ? CollectiveCall::dispatch : CollectiveCall::kv_gradient,
                            .origin = static_cast<std::uint32_t>(of_dispatch),
                            .plan = ready.plan_->fingerprint,
                            .formats = ready.plan_->formats},
            .num_sms = options.num_sms,
            .stream = stream};
  }

  void realign(const SequenceCall& call) {
    Executor& executor = world.executor();
    if (captures.may_be_off(executor.capture(call.stream))) executor.realign(call);
  }

  /// Makes a collective call, whose arguments are checked.
  void run(const char* who, const PlanHandle& ready, std::span<const ConstTensorView> inputs,
           std::span<const TensorView> outputs, Stream stream, std::uint64_t of_dispatch) {
    abort_state.guard([&] {
      grow_for(who, ready.plan_->window_bytes, ready.plan_->num_slots, stream);
      const SequenceCall call = next_call(who, ready, inputs, outputs, stream, of_dispatch);
      realign(call);
      if (call.plan->operation == SequenceOperation::dispatch) {
        world.executor().dispatch(call);
      } else {
        world.executor().kv_gradient(call);
      }
      captures.count();
      ++epoch;
    });
  }

  World world;
  SequenceDispatcherOptions options;
  CompileOptions compile;
  std::string name;  ///< " of dispatcher 2": its memory is not taken for that of another object
  SymmetricBuffer windows[2];
  std::vector<SymmetricBuffer> retired;  ///< outgrown; one may hold the last output
  std::uint64_t retired_epoch = 0;       ///< the last call when they were outgrown
  SignalPad arrivals;
  SignalPad slots;                   ///< for whom ranks wait, and the slots of batches
  std::vector<SignalPad> old_slots;  ///< outgrown
  std::uint64_t epoch = 0;           ///< the last call
  std::uint64_t num_dispatches = 0;
  detail::CaptureLog captures;
  detail::AbortState abort_state{"dispatcher", &world.transport()};
};

SequenceDispatcher::SequenceDispatcher(const World& world, SequenceDispatcherOptions options)
    : state_(std::make_unique<State>(world, options)) {}
SequenceDispatcher::SequenceDispatcher(SequenceDispatcher&&) noexcept = default;
SequenceDispatcher& SequenceDispatcher::operator=(SequenceDispatcher&&) noexcept = default;
SequenceDispatcher::~SequenceDispatcher() = default;

void SequenceDispatcher::close() {
  State& s = *state_;
  if (s.arrivals.local == nullptr) return;
  s.abort_state.check("close");
  s.abort_state.guard([&] {
    s.world.executor().finish();
    Transport& transport = s.world.transport();
    for (SymmetricBuffer& window : s.windows) s.retired.push_back(std::exchange(window, {}));
    for (SymmetricBuffer& buffer : s.retired) transport.release(buffer);
    s.retired.clear();
    for (SignalPad& pad : s.old_slots) transport.release(pad);
    s.old_slots.clear();
    transport.release(s.slots);
    transport.release(s.arrivals);
  });
  s.abort_state.end("was closed");
}

PlanHandle SequenceDispatcher::plan_dispatch(std::span<const SequencePart> parts, Stream stream) {
  state_->check_world("plan_dispatch", parts);
  return state_->handle_of(compile_dispatch(parts, state_->world.rank(), state_->compile), stream);
}

PlanHandle SequenceDispatcher::plan_kv_gradient(std::span<const SequencePart> parts,
                                                Stream stream) {
  state_->check_world("plan_kv_gradient", parts);
  return state_->handle_of(compile_kv_gradient(parts, state_->world.rank(), state_->compile),
                           stream);
}

void SequenceDispatcher::replace_plan(PlanHandle& ready, std::span<const SequencePart> parts,
                                      Stream stream) {
  constexpr const char* who = "replace_plan";
  const State& s = *state_;
  require(ready.uploaded_ != nullptr, who, ": the plan is empty");
  s.check_world(who, parts);
  const SequencePlan& old = *ready.plan_;
  CompileOptions options = s.compile;
  options.separate_local_copies =
      !old.local_segments.empty();  // a captured launch does one or the other
  SequencePlan plan = old.operation == SequenceOperation::dispatch
                          ? compile_dispatch(parts, s.world.rank(), options)
                          : compile_kv_gradient(parts, s.world.rank(), options);
  require(plan.tensors == old.tensors, who, ": parts have other formats than the plan");
  require(plan.window_bytes <= window_bytes(), who, ": the plan needs windows of ",
          plan.window_bytes, " bytes, expected at most ", window_bytes(), ": reserve() more");
  require(pad_size(s.world.world_size(), plan.num_slots) <= s.slots.count, who, ": the plan has ",
          plan.num_slots, " slots of batches, expected at most ",
          s.slots.count / s.world.world_size() - 1, ": reserve() more");
  s.world.executor().refill(*ready.uploaded_, plan, stream);
  *ready.plan_ = std::move(plan);
}

void SequenceDispatcher::reserve(std::int64_t window_bytes, Stream stream, std::int32_t num_slots) {
  State& s = *state_;
  require(0 <= window_bytes && window_bytes <= s.options.max_window_bytes,
          "reserve: window_bytes = ", window_bytes, ", expected 0..", s.options.max_window_bytes);
  require(0 <= num_slots && num_slots <= (1 << 24), "reserve: num_slots = ", num_slots,
          ", expected 0..2^24");
  s.abort_state.check("reserve");
  s.abort_state.guard([&] { s.grow_for("reserve", window_bytes, num_slots, stream); });
}

std::vector<TensorView> SequenceDispatcher::dispatch(const PlanHandle& ready,
                                                     std::span<const ConstTensorView> tensors,
                                                     Stream stream, std::uint64_t of_dispatch) {
  constexpr const char* who = "dispatch";
  State& s = *state_;
  s.check_call(who, ready, SequenceOperation::dispatch);
  check_inputs(who, "tensors", *ready.plan_, tensors);
  s.run(who, ready, tensors, {}, stream, of_dispatch);
  ++s.num_dispatches;
  return s.window_views(*ready.plan_, s.epoch);
}

void SequenceDispatcher::kv_gradient(const PlanHandle& ready,
                                     std::span<const ConstTensorView> gradients,
                                     std::span<const TensorView> outputs, Stream stream,
                                     std::uint64_t of_dispatch) {
  constexpr const char* who = "kv_gradient";
  State& s = *state_;
  s.check_call(who, ready, SequenceOperation::kv_gradient);
  check_inputs(who, "gradients", *ready.plan_, gradients);
  check_outputs(who, *ready.plan_, outputs);
  s.run(who, ready, gradients, outputs, stream, of_dispatch);
}

std::vector<TensorView> SequenceDispatcher::gradient_inputs(const PlanHandle& ready,
                                                            Stream stream) {
  constexpr const char* who = "gradient_inputs";
  State& s = *state_;
  s.check_call(who, ready, SequenceOperation::kv_gradient);
  s.abort_state.guard([&] {
    s.grow_for(who, ready.plan_->window_bytes, ready.plan_->num_slots, stream);
    s.realign(s.next_call(who, ready, {}, {}, stream, 0));  // now, as the caller writes there
  });
  return s.window_views(*ready.plan_, s.epoch + 1);
}

void SequenceDispatcher::synchronize(Stream stream) {
  state_->abort_state.guard([&] { state_->world.executor().synchronize(stream); });
}

std::vector<std::shared_ptr<void>> SequenceDispatcher::window_memory() const {
  std::vector<std::shared_ptr<void>> memory;
  for (const SymmetricBuffer& window : state_->windows)
    memory.insert(memory.end(), window.memory.begin(), window.memory.end());
  return memory;
}

std::uint64_t SequenceDispatcher::last_dispatch() const noexcept { return state_->num_dispatches; }
std::int64_t SequenceDispatcher::window_bytes() const noexcept {
  return state_->windows[0].size_bytes;
}
const SequenceDispatcherOptions& SequenceDispatcher::options() const noexcept {
  return state_->options;
}

}  // namespace waybill
