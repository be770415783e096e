#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "agreement.h"
#include "core/hash.h"
#include "experts/expert_executor.h"
#include "runtime/abort_state.h"
#include "runtime/capture_log.h"
#include "waybill/core/error.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill {
namespace {

/// The number of a layer among all that this process has made; unlike an address it is never
/// reused.
std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

template <class View>
void check_view(const char* who, const char* name, const View& view, DType dtype,
                const Shape& shape) {
  require(view.dtype == dtype, who, ": ", name, " is ", view.dtype, ", expected ", dtype);
  require(view.shape == shape, who, ": ", name, " has shape ", to_string(view.shape), ", expected ",
          to_string(shape));
  const std::int64_t elements = num_elements(view.shape, who);
  require(elements == 0 || view.strides == View::contiguous_strides(view.shape), who, ": ", name,
          " has strides ", to_string(view.strides), ", expected a contiguous tensor");
  require(elements == 0 || view.data != nullptr, who, ": ", name, " is null");
}

void check_positions(const EPConfig& config, const EPDispatchOptions& options,
                     const ConstTensorView& positions, std::int64_t own_tokens) {
  constexpr const char* who = "dispatch";
  require(options.rows == EPRows::grouped && options.expert_alignment == 1, who,
          ": full_scatter_indices are for grouped rows without padding");
  require(options.spare_experts == 0, who,
          ": full_scatter_indices are given, expected none with spare_experts = ",
          options.spare_experts);
  require(positions.dtype == DType::int32 || positions.dtype == DType::int64, who,
          ": full_scatter_indices is ", positions.dtype, ", expected int32 or int64");
  require(positions.ndim() == 2 && positions.shape[1] == config.topk, who,
          ": full_scatter_indices has shape ", to_string(positions.shape), ", expected [tokens of ",
          "all ranks, ", config.topk, "]");
  // The sum over ranks is known later; an empty table must not count as none till then.
  require(positions.shape[0] >= own_tokens, who, ": full_scatter_indices has ", positions.shape[0],
          " tokens, expected those of all ranks, and this one has ", own_tokens);
  require(positions.shape[0] <= config.world_size * config.max_tokens, who,
          ": full_scatter_indices has ", positions.shape[0],
          " tokens, expected those of all ranks, at most ", config.world_size, " * ",
          config.max_tokens);
  check_view(who, "full_scatter_indices", positions, positions.dtype, positions.shape);
}

/// @param ids_matter false: those of a layout are used
void check_dispatch_input(const EPConfig& config, const EPDispatchOptions& options,
                          const ExpertDispatchInput& input, bool ids_matter) {
  constexpr const char* who = "dispatch";
  const std::int64_t columns = input_columns(config, options);
  require(input.tokens.ndim() == 2, who, ": input has shape ", to_string(input.tokens.shape),
          ", expected [num_tokens, ", columns, "]");
  const std::int64_t tokens = input.tokens.shape[0];
  check_view(who, "input", input.tokens, input_dtype(config, options), {tokens, columns});
  require(tokens <= config.max_tokens, who, ": input has ", tokens,
          " tokens, expected at most max_tokens = ", config.max_tokens);
  if (ids_matter) {
    require(is_given(input.ids), who, ": exp_indices is not given, expected ",
            to_string(Shape{tokens, config.topk}), ", int32 or int64");
    require(input.ids.dtype == DType::int32 || input.ids.dtype == DType::int64, who,
            ": exp_indices is ", input.ids.dtype, ", expected int32 or int64");
    check_view(who, "exp_indices", input.ids, input.ids.dtype, {tokens, config.topk});
    if (is_given(input.full_scatter_indices)) {
      check_positions(config, options, input.full_scatter_indices, tokens);
    }
  }
  if (is_given(input.weights)) {
    check_view(who, "weight", input.weights, config.weight_dtype, {tokens, config.topk});
  }
  const std::int64_t scales = num_scales(config, options);
  if (options.payload.is_given() && scales > 0) {
    require(is_given(input.scales), who, ": scales are not given, expected ",
            to_string(Shape{tokens, scales}), ", ", options.payload.scale_dtype(), ": payload = \"",
            options.payload.name(), "\"");
    check_view(who, "scales", input.scales, options.payload.scale_dtype(), {tokens, scales});
  } else {
    require(!is_given(input.scales), who, ": scales are given, expected none: payload = \"",
            options.payload.name(), "\"");
  }
}

/// @param num_rows -1: not known on the host
void check_combine_input(const EPConfig& config, const ExpertCombineInput& input,
                         std::int64_t num_rows, std::int64_t num_tokens) {
  constexpr const char* who = "combine";
  if (num_rows < 0 && input.rows.ndim() == 2) num_rows = input.rows.shape[0];
  check_view(who, "input", input.rows, config.token_dtype, {num_rows, config.hidden});
  check_view(who, "output", input.output, config.token_dtype, {num_tokens, config.hidden});
  require(input.biases.size() <= 2, who, ": ", input.biases.size(), " biases, expected at most 2");
  for (const ConstTensorView& bias : input.biases) {
    check_view(who, "bias", bias, config.token_dtype, {num_tokens, config.hidden});
  }
}

void check_gradient_input(const EPConfig& config, const ExpertGradientInput& input) {
  constexpr const char* who = "weigh_gradients";
  const DType dtype = config.token_dtype;
  require(input.gradients.ndim() == 2, who, ": gradients has shape ",
          to_string(input.gradients.shape), ", expected [num_rows, ", config.hidden, "]");
  const std::int64_t rows = input.gradients.shape[0];
  const Shape shape{rows, config.hidden};
  check_view(who, "gradients", input.gradients, dtype, shape);
  if (is_given(input.row_gradients)) {
    check_view(who, "weights", input.weights, config.weight_dtype, {rows});
    check_view(who, "row_gradients", input.row_gradients, dtype, shape);
  }
  require(is_given(input.rows) == is_given(input.weight_gradients), who,
          ": one of rows and weight_gradients is given, expected both or none");
  if (!is_given(input.rows)) return;
  const bool wide = config.weight_dtype == DType::float64;
  check_view(who, "rows", input.rows, dtype, shape);
  check_view(who, "weight_gradients", input.weight_gradients,
             wide ? DType::float64 : DType::float32, {rows});
}

void check_copied_rows(const EPConfig& config, const ConstTensorView& from, const TensorView& to) {
  constexpr const char* who = "copy_rows";
  require(from.ndim() == 2, who, ": rows have shape ", to_string(from.shape),
          ", expected [num_rows, ", config.hidden, "]");
  const Shape shape{from.shape[0], config.hidden};
  check_view(who, "rows", from, config.token_dtype, shape);
  check_view(who, "the copy", to, config.token_dtype, shape);
}

IndexArray copied(const ConstTensorView& view) {
  return IndexArray::copy_of(view.data, view.shape, DType::int32);
}

IndexArray widened(const ConstTensorView& view) { return copied(view).to(DType::int64, "layout"); }

}  // namespace

bool EPLayout::has_weights() const { return is_given(tables_->weights()); }
ExpertTableViews EPLayout::tables() const { return tables_->views(); }
void EPLayout::note_use(Stream stream) const { tables_->routing().note_use(stream); }

std::int64_t EPLayout::num_recv_rows() const { return tables_->wait_counts()[config_.rank]; }

EPAll2AllLayoutDesc EPLayout::describe() const {
  const ExpertTableViews tables = tables_->views();
  const bool compact = options_.rows == EPRows::compact;
  EPAll2AllLayoutDesc desc;
  desc.num_dispatch_token_cur_rank = num_tokens_;
  desc.num_input_tokens_per_rank = copied(tables.num_input_tokens);
  if (!config_.is_intra_node()) desc.send_reqs_recv_tensor = copied(tables.send_reqs);
  desc.topk_indices_tensor = copied(tables.ids);
  desc.token_dst_scatter_idx = copied(tables.dst_rows);
  if (config_.is_intra_node() && !compact) {
    desc.skipped_token_mapping_indices = widened(tables.primary_rows);
    desc.skipped_token_topk_mapping_indices = widened(tables.topk_slot_rows);
  }
  desc.recv_expert_counts = copied(tables.expert_counts);
  desc.recv_expert_offsets = copied(tables.expert_offsets);
  if (compact) {
    desc.recv_topk_indices = copied(tables.recv_topk);
    desc.compact_to_grouped = copied(tables.compact_to_grouped);
    desc.grouped_to_compact = copied(tables.grouped_to_compact);
  }
  if (is_given(tables.slot_experts)) {
    const std::int64_t slots = tables.slot_experts.shape[1];
    const auto* const all = reinterpret_cast<const std::int32_t*>(tables.slot_experts.data);
    desc.slot_experts = IndexArray::copy_of(all + config_.rank * slots, {slots}, DType::int32);
    desc.all_slot_experts = copied(tables.slot_experts);
    desc.all_slot_quotas = copied(tables.slot_quotas);
  }
  return desc;
}

struct EPAll2AllLayer::State {
  State(const World& of, const EPConfig& of_config, const EPLayerOptions& of_options)
      : world(of),
        config(of_config),
        options(of_options),
        context(DispatchCombineContext::make(of, of_config, of_options, "EPAll2AllLayer")),
        fingerprint(detail::layer_fingerprint(of_config, of_options)),
        signals(of.transport(), of_config),
        executor(make_expert_executor(of, config, options.dispatch, context.memory())) {}

  [[nodiscard]] ExpertCall next_call(const char* operation, std::uint64_t number,
                                     const Stream& stream, const CallFingerprint& of_call) const;
  [[nodiscard]] CallFingerprint fingerprint_now() const;
  [[nodiscard]] std::uint64_t realign(const ExpertCall& call);
  [[nodiscard]] bool may_take_second_place(const Stream& stream) const;
  EPDispatched dispatch(const ExpertDispatchInput& input, const EPLayout* known,
                        const Stream& stream);
  [[nodiscard]] const ExpertTables* present_tables(const EPLayout* present) const;
  void grow_for(const ExpertTables& tables, const Stream& stream);
  [[nodiscard]] bool goes_alike(const EPLayout& layout) const;
  void check_rows(const ExpertCombineInput& input, const EPLayout& layout) const;
  void check_place(const ConstTensorView& rows) const;
  void check_own(const EPLayout& layout, const char* who) const {
    require(layout.layer_ == id, who, ": the layout belongs to another layer");
  }

  World world;
  EPConfig config;
  EPLayerOptions options;
  std::uint64_t id = next_id();
  DispatchCombineContext context;
  CallFingerprint fingerprint;  ///< the settings alone
  detail::LayerSignals signals;
  std::unique_ptr<ExpertExecutor> executor;
  std::uint64_t epoch = 0;  ///< number of the last call
  std::uint64_t num_dispatches = 0;
  std::uint64_t num_combines = 0;
  std::uint64_t num_places = 0;        ///< given by combine_input for the next combines, not used
  bool ends_with_combine = false;      ///< the last call was one
  bool has_recorded = false;           ///< graphs hold combines, and may run them at any time
  std::uint64_t dispatch_capture = 0;  ///< recording of the last dispatch
  detail::CaptureLog captured_dispatches;
  detail::CaptureLog captured_combines;
  detail::AbortState abort_state{"layer", &world.transport()};
};

EPAll2AllLayer::EPAll2AllLayer(const World& world, const EPConfig& config,
                               const EPLayerOptions& options)
    : state_(std::make_unique<State>(world, config, options)) {}
EPAll2AllLayer::EPAll2AllLayer(EPAll2AllLayer&& other) noexcept = default;
EPAll2AllLayer& EPAll2AllLayer::operator=(EPAll2AllLayer&& other) noexcept = default;
EPAll2AllLayer::~EPAll2AllLayer() = default;

const EPConfig& EPAll2AllLayer::config() const noexcept { return state_->config; }
const EPLayerOptions& EPAll2AllLayer::options() const noexcept { return state_->options; }
const DispatchCombineContext& EPAll2AllLayer::context() const noexcept { return state_->context; }
std::int64_t EPAll2AllLayer::output_rows() const noexcept {
  return state_->context.capacity_rows();
}

CallFingerprint EPAll2AllLayer::State::fingerprint_now() const {
  CallFingerprint now = fingerprint;
  now.options = Hash().add(now.options).add(context.capacity_rows()).value();
  return now;
}

ExpertCall EPAll2AllLayer::State::next_call(const char* operation, std::uint64_t number,
                                            const Stream& stream,
                                            const CallFingerprint& of_call) const {
  return {.operation = operation,
          .memory = &context.memory(),
          .epoch = epoch + 1,
          .parity = static_cast<std::uint32_t>(number % 2),
          .num_sms = options.num_sms,
          .stream = &stream,
          .fingerprint = of_call,
          .may_grow = options.fixed_rows == 0,
          .max_per_expert = options.max_per_expert,
          .sums_locally = options.enable_local_combine};
}

/// @return the recording that the call goes to
std::uint64_t EPAll2AllLayer::State::realign(const ExpertCall& call) {
  const std::uint64_t capture = world.executor().capture(*call.stream);
  const bool dispatches = captured_dispatches.may_be_off(capture);
  const bool combines = captured_combines.may_be_off(capture);
  if (dispatches || combines) {
    executor->realign(call, static_cast<std::uint32_t>(num_dispatches % 2),
                      static_cast<std::uint32_t>(num_combines % 2));
  }
  return capture;
}

void EPAll2AllLayer::State::grow_for(const ExpertTables& tables, const Stream& stream) {
  if (options.fixed_rows > 0) return;
  const auto counts = tables.wait_counts();
  const std::int64_t rows =
      grown_output_rows(context.capacity_rows(), *std::ranges::max_element(counts));
  if (rows == context.capacity_rows()) return;
  world.executor().synchronize(stream);
  (void)context.reallocate_dispatch_output_buf(rows);
}

/// @return the tables whose copies are there already; null: none
const ExpertTables* EPAll2AllLayer::State::present_tables(const EPLayout* present) const {
  if (present == nullptr) return nullptr;
  require(options.dispatch.spare_experts > 0,
          "dispatch: present is given, expected none without spare experts");
  require(present->layer_ == id, "dispatch: present belongs to another layer");
  return present->tables_.get();
}

/// @param known null: the dispatch counts
EPDispatched EPAll2AllLayer::State::dispatch(const ExpertDispatchInput& input,
                                             const EPLayout* known, const Stream& stream) {
  abort_state.check("dispatch");
  check_dispatch_input(config, options.dispatch, input, known == nullptr);
  std::optional<std::uint32_t> routing;
  if (known != nullptr) {
    check_own(*known, "dispatch");
    require(input.tokens.shape[0] == known->num_tokens_, "dispatch: input has ",
            input.tokens.shape[0], " tokens, expected ", known->num_tokens_, ", as the layout");
    routing = known->routing_;
  }
  const ExpertTables* const present = known == nullptr ? present_tables(input.present) : nullptr;
  ExpertCall call =
      next_call("dispatch", num_dispatches, stream,
                detail::dispatch_fingerprint(fingerprint_now(), input, routing,
                                             present == nullptr ? 0 : input.present->routing_));
  call.present = present;
  std::shared_ptr<ExpertTables> begun;
  abort_state.guard([&] {
    dispatch_capture = realign(call);
    begun = known == nullptr ? executor->route(call, input)
                             : executor->enter(call, input, *known->tables_);
  });
  captured_dispatches.count();
  ++epoch;
  ++num_dispatches;
  ends_with_combine = false;
  abort_state.guard([&] {
    grow_for(*begun, stream);
    executor->dispatch(call, input, *begun);
  });
  const auto layout = std::make_shared<EPLayout>();
  layout->config_ = config;
  layout->options_ = options.dispatch;
  layout->fixed_rows_ = options.fixed_rows;
  layout->world_ = &world.transport();
  layout->tables_ = std::move(begun);
  layout->num_tokens_ = input.tokens.shape[0];
  layout->layer_ = id;
  layout->number_ = static_cast<std::uint32_t>(num_dispatches);
  layout->routing_ = routing.value_or(layout->number_);
  const std::int64_t rows = options.fixed_rows > 0 ? options.fixed_rows : layout->num_recv_rows();
  const DispatchOutputBuffers buffers = context.buffers(call.parity, rows);
  return {.rows = buffers.rows,
          .weights = is_given(input.weights) ? buffers.weights : TensorView{},
          .scales = context.scales(call.parity, rows),
          .layout = layout};
}

EPDispatched EPAll2AllLayer::dispatch(const ExpertDispatchInput& input, Stream stream) {
  return state_->dispatch(input, nullptr, stream);
}

EPDispatched EPAll2AllLayer::dispatch(const ExpertDispatchInput& input, const EPLayout& layout,
                                      Stream stream) {
  return state_->dispatch(input, &layout, stream);
}

/// As many rows as arrived are expected. With fixed_rows there may be more, up to those of the
/// windows; where only the device knows how many arrived, it checks that there are not fewer.
void EPAll2AllLayer::State::check_rows(const ExpertCombineInput& input,
                                       const EPLayout& layout) const {
  const bool fixed = options.fixed_rows > 0;
  check_combine_input(config, input, fixed ? -1 : layout.num_recv_rows(), layout.num_tokens_);
  const std::int64_t rows = input.rows.shape[0];
  const auto counts = layout.tables_->routing().known_counts();
  if (!fixed || counts.empty()) return;
  const std::int64_t arrived = counts[config.rank];
  require(rows >= std::min(arrived, options.fixed_rows), "combine: input has ", rows,
          " rows, expected at least ", std::min(arrived, options.fixed_rows),
          ", as the dispatch gave");
}

/// Whether rows of the layout come from the same places as those of this layer, and return there.
bool EPAll2AllLayer::State::goes_alike(const EPLayout& layout) const {
  EPConfig theirs = layout.config_;
  theirs.hidden = config.hidden;
  theirs.token_dtype = config.token_dtype;
  theirs.weight_dtype = config.weight_dtype;
  const EPDispatchOptions& mine = options.dispatch;
  const EPDispatchOptions& other = layout.options_;
  return layout.world_ == &world.transport() && layout.fixed_rows_ == options.fixed_rows &&
         theirs == config && other.rows == mine.rows &&
         other.expert_alignment == mine.expert_alignment &&
         other.spare_experts == mine.spare_experts;
}

/// Refuses rows in a combine window unless combine_input gave that place for the next combine.
void EPAll2AllLayer::State::check_place(const ConstTensorView& rows) const {
  for (std::uint32_t parity = 0; parity < 2; ++parity) {
    const TensorView window = context.combine_rows(parity, context.capacity_rows());
    const std::int64_t bytes =
        context.capacity_rows() * config.hidden * dtype_bytes(config.token_dtype);
    const std::less<const std::byte*> before;
    if (before(rows.data, window.data) || !before(rows.data, window.data + bytes)) continue;
    require(rows.data == window.data && parity == num_combines % 2 && num_places > 0,
            "combine: input is in the memory of another combine, expected what combine_input "
            "returned for this one, or other memory");
  }
}

void EPAll2AllLayer::combine(const ExpertCombineInput& input, const EPLayout& layout,
                             Stream stream) {
  State& state = *state_;
  state.abort_state.check("combine");
  require(layout.layer_ == state.id || (input.of_companion && state.goes_alike(layout)),
          "combine: the layout belongs to another layer");
  state.options.dispatch.payload.check_combine("combine");
  state.check_rows(input, layout);
  state.check_place(input.rows);
  require(!input.options.weighted || layout.has_weights(),
          "combine: weighted = true, but the dispatch had no weights");
  require(!input.options.weighted || state.options.dispatch.rows == EPRows::grouped,
          "combine: weighted = true, expected false for compact rows: they hold sums already");
  if (input.of_companion) state.abort_state.guard([&] { state.grow_for(*layout.tables_, stream); });
  require(input.rows.shape[0] <= state.context.capacity_rows(), "combine: input has ",
          input.rows.shape[0], " rows, expected at most ", state.context.capacity_rows());
  ExpertCombineInput checked = input;
  checked.options.local_combine = state.options.enable_local_combine;
  const ExpertCall call = state.next_call(
      "combine", state.num_combines, stream,
      detail::combine_fingerprint(state.fingerprint_now(), checked, layout.number_));
  state.abort_state.guard([&] {
    state.has_recorded = state.realign(call) != 0 || state.has_recorded;
    state.executor->combine(call, checked, *layout.tables_);
  });
  state.captured_combines.count();
  ++state.epoch;
  ++state.num_combines;
  state.ends_with_combine = true;
  state.num_places -= std::min<std::uint64_t>(state.num_places, 1);
}

void EPAll2AllLayer::weigh_gradients(const ExpertGradientInput& input, const EPLayout& layout,
                                     Stream stream) {
  State& state = *state_;
  constexpr const char* who = "weigh_gradients";
  state.abort_state.check(who);
  state.check_own(layout, who);
  check_gradient_input(state.config, input);
  state.abort_state.guard([&] { state.executor->weigh_gradients(input, *layout.tables_, stream); });
}

void EPAll2AllLayer::copy_rows(const ConstTensorView& from, const TensorView& to,
                               const EPLayout& layout, Stream stream) {
  State& state = *state_;
  constexpr const char* who = "copy_rows";
  state.abort_state.check(who);
  state.check_own(layout, who);
  check_copied_rows(state.config, from, to);
  state.abort_state.guard([&] { state.executor->copy_rows(from, to, *layout.tables_, stream); });
}

/// The combine after the next uses the window of the last one. Other ranks have read it if a
/// dispatch, in which all ranks wait for each other, has come since and no graph may have combined
/// after that.
bool EPAll2AllLayer::State::may_take_second_place(const Stream& stream) const {
  const std::uint64_t capture = world.executor().capture(stream);
  return !ends_with_combine && capture == dispatch_capture && (capture != 0 || !has_recorded);
}

TensorView EPAll2AllLayer::combine_input(std::int64_t rows, Stream stream) {
  State& state = *state_;
  constexpr const char* who = "combine_input";
  state.abort_state.check(who);
  require(0 <= rows && rows <= state.context.capacity_rows(), who, ": rows = ", rows,
          ", expected 0..", state.context.capacity_rows());
  require(state.num_places < 2, who,
          ": the memory of the next two combines is taken, expected a "
          "combine before this call");
  require(state.num_places == 0 || state.may_take_second_place(stream), who,
          ": other ranks may still read the "
          "memory of the combine after the next, expected a combine or a dispatch before this "
          "call");
  // Other ranks may also still read rows that a graph has left there.
  state.abort_state.guard([&] {
    (void)state.realign(state.next_call(who, state.num_combines, stream, state.fingerprint_now()));
  });
  const std::uint64_t number = state.num_combines + state.num_places++;
  return state.context.combine_rows(static_cast<std::uint32_t>(number % 2), rows);
}

void EPAll2AllLayer::ep_barrier_all(Stream stream, bool intra_node_only) {
  State& state = *state_;
  state.abort_state.check("ep_barrier_all");
  state.abort_state.guard([&] { state.signals.barrier(*state.executor, stream, intra_node_only); });
}

bool EPAll2AllLayer::combine_needs_gradients(const EPLayout& layout, bool mine, bool asks) {
  State& state = *state_;
  state.abort_state.check("combine");
  state.check_own(layout, "combine");
  if (state.options.fixed_rows > 0) return mine;
  bool result = mine;
  state.abort_state.guard([&] {
    const auto counts = layout.tables_->wait_counts();
    result = state.signals.needs_gradients(counts, state.num_combines + 1, mine, asks);
  });
  return result;
}

void EPAll2AllLayer::synchronize(Stream stream) {
  State& state = *state_;
  state.abort_state.check("synchronize");
  state.abort_state.guard([&] { state.world.executor().synchronize(stream); });
  check_overflow();
}

ExpertOverflow EPAll2AllLayer::overflow() { return state_->executor->take_overflow(); }

void EPAll2AllLayer::check_overflow() {
  const ExpertOverflow over = overflow();
  require(over.rows == 0, "dispatch ", over.call, ": a rank was sent ", over.rows,
          " rows, expected at most fixed_rows = ", options().fixed_rows,
          "; those that did not fit are lost, and the sums of their tokens are NaN");
}

void EPAll2AllLayer::finalize() {
  State& state = *state_;
  if (state.context.finalized()) return;
  state.abort_state.check("finalize");
  state.abort_state.guard([&] {
    state.context.finalize();
    state.executor->release();
    state.signals.release();
  });
  state.abort_state.end("was finalized");
}

}  // namespace waybill
