#include "layer_state.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>

#include "expert_checks.h"
#include "agreement.h"
#include "layer_meetings.h"
#include "waybill/core/error.h"

namespace waybill::detail {

namespace {

/// Of a layer among all that this process has made: an address may come again.
std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

DispatchCombineContext LayerState::make_context(const World& world, const EPConfig& config,
                                                const EPLayerOptions& options) {
  constexpr const char* who = "EPAll2AllLayer";
  const Setting mine[] = {{"enable_local_combine", options.enable_local_combine ? "true" : "false"},
                          {"push_combine", options.push_combine ? "true" : "false"},
                          {"fixed_rows", concat(options.fixed_rows)},
                          {"max_per_expert", concat(options.max_per_expert)},
                          {"capacity", concat(options.capacity_factor)}};
  const auto num_rows = [&] {
    check_combine_of_environment(who);
    require(options.num_sms >= 1, who, ": num_sms = ", options.num_sms, ", expected >= 1");
    require(options.fixed_rows >= 0, who, ": fixed_rows = ", options.fixed_rows, ", expected >= 0");
    require(options.max_per_expert >= 0, who, ": max_per_expert = ", options.max_per_expert,
            ", expected >= 0");
    if (options.fixed_rows > 0) return options.fixed_rows;
    return DispatchCombineContext::rows_of(config, options.capacity_factor, who);
  };
  const bool once = options.enable_local_combine || options.dispatch.rows == EPRows::compact;
  return DispatchCombineContext::make(world, config, options.dispatch, who, mine, num_rows,
                                      options.push_combine ? slab_slots(config, once) : 0);
}

LayerState::LayerState(const World& world, const EPConfig& config, const EPLayerOptions& options)
    : world_(world),
      config_(config),
      options_(options),
      id_(next_id()),
      context_(make_context(world, config, options)),
      meetings_(std::make_unique<LayerMeetings>(world.transport(), config)),
      executor_(make_expert_executor(world, config_, options_.dispatch, context_.memory())) {}

LayerState::~LayerState() = default;

CallFingerprint LayerState::fingerprint() const {
  return layer_fingerprint(config_, options_.dispatch, context_.capacity_rows());
}

ExpertCall LayerState::next_call(const char* operation, std::uint64_t number, const Stream& stream,
                                 const CallFingerprint& fingerprint) const {
  return {.operation = operation,
          .memory = &context_.memory(),
          .epoch = epoch_ + 1,
          .parity = static_cast<std::uint32_t>(number % 2),
          .num_sms = options_.num_sms,
          .stream = &stream,
          .fingerprint = fingerprint,
          .may_grow = options_.fixed_rows == 0,
          .max_per_expert = options_.max_per_expert,
          .sums_locally = options_.enable_local_combine};
}

/// @return the recording that the call goes to
std::uint64_t LayerState::realign(const ExpertCall& call) {
  const std::uint64_t capture = world_.executor().capture(*call.stream);
  const bool dispatches = captured_dispatches_.may_be_off(capture);
  const bool combines = captured_combines_.may_be_off(capture);
  if (dispatches || combines) {
    executor_->realign(call, {.dispatch = static_cast<std::uint32_t>(num_dispatches_ % 2),
                              .combine = static_cast<std::uint32_t>(num_combines_ % 2)});
  }
  return capture;
}

void LayerState::grow_for(const ExpertTables& tables, const Stream& stream) {
  if (options_.fixed_rows > 0) return;
  const auto counts = tables.wait_counts();
  const std::int64_t rows =
      grown_output_rows(context_.capacity_rows(), *std::ranges::max_element(counts));
  if (rows == context_.capacity_rows()) return;
  world_.executor().synchronize(stream);
  (void)context_.reallocate_dispatch_output_buf(rows);
}

EPDispatched LayerState::finish_dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                                         std::shared_ptr<ExpertTables> begun,
                                         std::uint32_t routing) {
  captured_dispatches_.count();
  ++epoch_;
  ++num_dispatches_;
  ends_with_combine_ = false;
  abort_state_.guard([&] {
    grow_for(*begun, *call.stream);
    executor_->dispatch(call, input, *begun);
  });
  const auto layout = std::make_shared<EPLayout>();
  layout->config_ = config_;
  layout->options_ = options_.dispatch;
  layout->fixed_rows_ = options_.fixed_rows;
  layout->world_ = &world_.transport();
  layout->tables_ = std::move(begun);
  layout->num_tokens_ = input.tokens.shape[0];
  layout->layer_ = id_;
  layout->number_ = static_cast<std::uint32_t>(num_dispatches_);
  layout->routing_ = routing;
  const std::int64_t rows = options_.fixed_rows > 0 ? options_.fixed_rows : layout->num_recv_rows();
  const DispatchOutputBuffers buffers = context_.buffers(call.parity, rows);
  return {.rows = buffers.rows,
          .weights = is_given(input.weights) ? buffers.weights : TensorView{},
          .scales = context_.scales(call.parity, rows),
          .layout = layout};
}

EPDispatched LayerState::dispatch(const ExpertDispatchInput& input, Stream stream) {
  abort_state_.check("dispatch");
  check_dispatch_input(config_, options_.dispatch, input, true);
  const ExpertCall call =
      next_call("dispatch", num_dispatches_, stream, counting_fingerprint(fingerprint(), input));
  const auto number = static_cast<std::uint32_t>(num_dispatches_ + 1);
  std::shared_ptr<ExpertTables> begun;
  abort_state_.guard([&] {
    dispatch_capture_ = realign(call);
    begun = executor_->route(call, input);
  });
  return finish_dispatch(call, input, std::move(begun), number);
}

EPDispatched LayerState::dispatch(const ExpertDispatchInput& input, const EPLayout& layout,
                                  Stream stream) {
  abort_state_.check("dispatch");
  check_dispatch_input(config_, options_.dispatch, input, false);
  require(layout.layer_ == id_, "dispatch: the layout belongs to another layer");
  require(input.tokens.shape[0] == layout.num_tokens_, "dispatch: input has ",
          input.tokens.shape[0], " tokens, expected ", layout.num_tokens_, ", as the layout");
  const ExpertCall call = next_call("dispatch", num_dispatches_, stream,
                                    known_fingerprint(fingerprint(), input, layout.routing_));
  std::shared_ptr<ExpertTables> begun;
  abort_state_.guard([&] {
    dispatch_capture_ = realign(call);
    begun = executor_->enter(call, input, *layout.tables_);
  });
  return finish_dispatch(call, input, std::move(begun), layout.routing_);
}

/// Rows are those that arrived. With fixed_rows there may be more, up to the windows'; whether
/// there are fewer the device checks, where only it knows.
void LayerState::check_rows(const ExpertCombineInput& input, const EPLayout& layout) const {
  const bool fixed = options_.fixed_rows > 0;
  check_combine_input(config_, input, fixed ? -1 : layout.num_recv_rows(), layout.num_tokens_);
  const std::int64_t rows = input.rows.shape[0];
  const auto counts = layout.tables_->routing().known_counts();
  if (!fixed || counts.empty()) return;
  const std::int64_t arrived = counts[static_cast<std::size_t>(config_.rank)];
  require(rows >= std::min(arrived, options_.fixed_rows), "combine: input has ", rows,
          " rows, expected at least ", std::min(arrived, options_.fixed_rows),
          ", as the dispatch gave");
}

/// Whether rows of the layout come from and go to where those of this layer would.
bool LayerState::goes_alike(const EPLayout& layout) const {
  EPConfig config = layout.config_;
  config.hidden = config_.hidden;
  config.token_dtype = config_.token_dtype;
  config.weight_dtype = config_.weight_dtype;
  const EPDispatchOptions& mine = options_.dispatch;
  const EPDispatchOptions& other = layout.options_;
  return layout.world_ == &world_.transport() && layout.fixed_rows_ == options_.fixed_rows &&
         config == config_ && other.rows == mine.rows &&
         other.expert_alignment == mine.expert_alignment;
}

/// Rows that lie in a combine window are what the next combine was to get there.
void LayerState::check_place(const ConstTensorView& rows) const {
  for (std::uint32_t parity = 0; parity < 2; ++parity) {
    const TensorView window = context_.combine_rows(parity, context_.capacity_rows());
    const std::int64_t bytes =
        context_.capacity_rows() * config_.hidden * dtype_bytes(config_.token_dtype);
    const std::less<const std::byte*> before;
    if (before(rows.data, window.data) || !before(rows.data, window.data + bytes)) continue;
    require(rows.data == window.data && parity == num_combines_ % 2 && num_places_ > 0,
            "combine: input is in the memory of another combine, expected what combine_input "
            "returned for this one, or other memory");
  }
}

void LayerState::combine(const ExpertCombineInput& input, const EPLayout& layout, Stream stream) {
  abort_state_.check("combine");
  require(layout.layer_ == id_ || (input.of_companion && goes_alike(layout)),
          "combine: the layout belongs to another layer");
  check_rows(input, layout);
  check_place(input.rows);
  require(!input.options.weighted || layout.has_weights(),
          "combine: weighted = true, but the dispatch had no weights");
  require(!input.options.weighted || options_.dispatch.rows == EPRows::grouped,
          "combine: weighted = true, expected false for compact rows: they hold sums already");
  if (input.of_companion) abort_state_.guard([&] { grow_for(*layout.tables_, stream); });
  require(input.rows.shape[0] <= context_.capacity_rows(), "combine: input has ",
          input.rows.shape[0], " rows, expected at most ", context_.capacity_rows());
  ExpertCombineInput checked = input;
  checked.options.local_combine = options_.enable_local_combine;
  const ExpertCall call = next_call("combine", num_combines_, stream,
                                    combine_fingerprint(fingerprint(), checked, layout.number_));
  abort_state_.guard([&] {
    has_recorded_ = realign(call) != 0 || has_recorded_;
    executor_->combine(call, checked, *layout.tables_);
  });
  captured_combines_.count();
  ++epoch_;
  ++num_combines_;
  ends_with_combine_ = true;
  num_places_ -= std::min<std::uint64_t>(num_places_, 1);
}

void LayerState::weigh_gradients(const ExpertGradientInput& input, const EPLayout& layout,
                                 Stream stream) {
  constexpr const char* who = "weigh_gradients";
  abort_state_.check(who);
  require(layout.layer_ == id_, who, ": the layout belongs to another layer");
  check_gradient_input(config_, input);
  abort_state_.guard([&] { executor_->weigh_gradients(input, *layout.tables_, stream); });
}

void LayerState::copy_rows(const ConstTensorView& from, const TensorView& to,
                           const EPLayout& layout, Stream stream) {
  constexpr const char* who = "copy_rows";
  abort_state_.check(who);
  require(layout.layer_ == id_, who, ": the layout belongs to another layer");
  check_copied_rows(config_, from, to);
  abort_state_.guard([&] { executor_->copy_rows(from, to, *layout.tables_, stream); });
}

/// The window of the combine after the next is that of the last one: other ranks have read it when
/// a dispatch, for which all of them wait, has come since; a graph may have combined even then.
bool LayerState::may_take_second_place(const Stream& stream) const {
  const std::uint64_t capture = world_.executor().capture(stream);
  return !ends_with_combine_ && capture == dispatch_capture_ && (capture != 0 || !has_recorded_);
}

TensorView LayerState::combine_input(std::int64_t rows, Stream stream) {
  constexpr const char* who = "combine_input";
  abort_state_.check(who);
  require(0 <= rows && rows <= context_.capacity_rows(), who, ": rows = ", rows, ", expected 0..",
          context_.capacity_rows());
  require(num_places_ < 2, who,
          ": the memory of the next two combines is taken, expected a "
          "combine before this call");
  require(num_places_ == 0 || may_take_second_place(stream), who,
          ": other ranks may still read the "
          "memory of the combine after the next, expected a combine or a dispatch before this "
          "call");
  // What a graph has left there others may still read, too.
  abort_state_.guard([&] { (void)realign(next_call(who, num_combines_, stream, fingerprint())); });
  const std::uint64_t number = num_combines_ + num_places_++;
  return context_.combine_rows(static_cast<std::uint32_t>(number % 2), rows);
}

void LayerState::ep_barrier_all(Stream stream, bool intra_node_only) {
  abort_state_.check("ep_barrier_all");
  abort_state_.guard([&] { meetings_->barrier(*executor_, stream, intra_node_only); });
}

bool LayerState::combine_needs_gradients(const EPLayout& layout, bool mine, bool asks) {
  abort_state_.check("combine");
  require(layout.layer_ == id_, "combine: the layout belongs to another layer");
  if (options_.fixed_rows > 0) return mine;
  bool result = mine;
  abort_state_.guard([&] {
    const auto counts = layout.tables_->wait_counts();
    result = meetings_->needs_gradients(counts, num_combines_ + 1, mine, asks);
  });
  return result;
}

void LayerState::synchronize(Stream stream) {
  abort_state_.check("synchronize");
  abort_state_.guard([&] { world_.executor().synchronize(stream); });
  check_overflow();
}

ExpertOverflow LayerState::overflow() { return executor_->take_overflow(); }

void LayerState::check_overflow() {
  const ExpertOverflow over = overflow();
  require(over.rows == 0, "dispatch ", over.call, ": a rank was sent ", over.rows,
          " rows, expected at most fixed_rows = ", options_.fixed_rows,
          "; those that did not fit are lost, and the sums of their tokens are NaN");
}

void LayerState::finalize() {
  if (context_.finalized()) return;
  abort_state_.check("finalize");
  abort_state_.guard([&] {
    context_.finalize();
    meetings_->release();
  });
  abort_state_.end("was finalized");
}

}  // namespace waybill::detail
