#include "waybill/runtime/ep_all2all_layer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "expert_checks.h"
#include "layer_agreement.h"
#include "waybill/core/error.h"

namespace waybill {

namespace {

/// Of a layer among all that this process has made: an address may come again.
std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

DispatchCombineContext EPAll2AllLayer::make_context(World& world, const EPConfig& config,
                                                    const EPLayerOptions& options) {
  constexpr const char* who = "EPAll2AllLayer";
  require(options.num_sm >= 1, who, ": num_sm = ", options.num_sm, ", expected >= 1");
  require(options.fixed_rows >= 0, who, ": fixed_rows = ", options.fixed_rows, ", expected >= 0");
  const std::int64_t rows =
      options.fixed_rows > 0
          ? options.fixed_rows
          : DispatchCombineContext::rows_of(config, options.dispatch, options.capacity, who);
  const Setting mine[] = {{"enable_local_combine", options.enable_local_combine ? "true" : "false"},
                          {"fixed_rows", concat(options.fixed_rows)},
                          {"capacity", concat(options.capacity)}};
  return DispatchCombineContext::make(world, config, options.dispatch, rows, who, mine);
}

EPAll2AllLayer::EPAll2AllLayer(World& world, const EPConfig& config, const EPLayerOptions& options)
    : world_(world),
      config_(config),
      options_(options),
      id_(next_id()),
      context_(make_context(world, config, options)),
      barrier_(world),
      executor_(
          world.executor().make_expert_executor(config_, options_.dispatch, context_.memory())) {}

EPAll2AllLayer::~EPAll2AllLayer() = default;

CallFingerprint EPAll2AllLayer::fingerprint() const {
  return detail::layer_fingerprint(config_, options_.dispatch, context_.capacity());
}

ExpertCall EPAll2AllLayer::next_call(const char* operation, std::uint64_t number,
                                     const Stream& stream,
                                     const CallFingerprint& fingerprint) const {
  return {.operation = operation,
          .memory = &context_.memory(),
          .epoch = epoch_ + 1,
          .parity = static_cast<std::uint32_t>(number % 2),
          .num_sms = options_.num_sm,
          .stream = &stream,
          .fingerprint = fingerprint};
}

void EPAll2AllLayer::realign(const ExpertCall& call) {
  const std::uint64_t capture = world_.executor().capture(*call.stream);
  const bool dispatches = captured_dispatches_.may_be_off(capture);
  const bool combines = captured_combines_.may_be_off(capture);
  if (!dispatches && !combines) return;
  executor_->realign(call, {.dispatch = static_cast<std::uint32_t>(num_dispatches_ % 2),
                            .combine = static_cast<std::uint32_t>(num_combines_ % 2)});
}

void EPAll2AllLayer::grow_for(const ExpertTables& tables, const Stream& stream) {
  if (options_.fixed_rows > 0) return;
  const auto counts = tables.wait_counts();
  const std::int64_t rows =
      grown_output_rows(context_.capacity(), *std::ranges::max_element(counts));
  if (rows == context_.capacity()) return;
  world_.executor().synchronize(stream);
  (void)context_.reallocate_dispatch_output_buf(rows);
}

EPDispatched EPAll2AllLayer::finish_dispatch(const ExpertCall& call,
                                             const ExpertDispatchInput& input,
                                             std::shared_ptr<ExpertTables> begun,
                                             std::uint32_t routing) {
  captured_dispatches_.count();
  ++epoch_;
  ++num_dispatches_;
  usability_.guard([&] {
    grow_for(*begun, *call.stream);
    executor_->dispatch(call, input, *begun);
  });
  const auto layout = std::make_shared<EPLayout>();
  layout->config_ = config_;
  layout->options_ = options_.dispatch;
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

EPDispatched EPAll2AllLayer::dispatch(const ExpertDispatchInput& input, Stream stream) {
  usability_.check("dispatch");
  detail::check_dispatch_input(config_, options_.dispatch, input, true);
  const ExpertCall call = next_call("dispatch", num_dispatches_, stream,
                                    detail::counting_fingerprint(fingerprint(), input));
  const auto number = static_cast<std::uint32_t>(num_dispatches_ + 1);
  std::shared_ptr<ExpertTables> begun;
  usability_.guard([&] {
    realign(call);
    begun = executor_->route(call, input);
  });
  return finish_dispatch(call, input, std::move(begun), number);
}

EPDispatched EPAll2AllLayer::dispatch(const ExpertDispatchInput& input, const EPLayout& layout,
                                      Stream stream) {
  usability_.check("dispatch");
  detail::check_dispatch_input(config_, options_.dispatch, input, false);
  require(layout.layer_ == id_, "dispatch: the layout is not of this layer");
  require(input.tokens.shape[0] == layout.num_tokens_, "dispatch: input has ",
          input.tokens.shape[0], " tokens, expected ", layout.num_tokens_, ", as the layout");
  const ExpertCall call =
      next_call("dispatch", num_dispatches_, stream,
                detail::known_fingerprint(fingerprint(), input, layout.routing_));
  std::shared_ptr<ExpertTables> begun;
  usability_.guard([&] {
    realign(call);
    begun = executor_->enter(call, input, *layout.tables_);
  });
  return finish_dispatch(call, input, std::move(begun), layout.routing_);
}

void EPAll2AllLayer::combine(const ExpertCombineInput& input, const EPLayout& layout,
                             Stream stream) {
  usability_.check("combine");
  require(layout.layer_ == id_, "combine: the layout is not of this layer");
  const bool fixed = options_.fixed_rows > 0;
  detail::check_combine_input(config_, input, fixed ? -1 : layout.num_recv_rows(),
                              layout.num_tokens_);
  require(input.rows.shape[0] <= context_.capacity(), "combine: input has ", input.rows.shape[0],
          " rows, expected at most ", context_.capacity());
  require(!input.options.weighted || layout.has_weights(),
          "combine: weighted = true, but the dispatch had no weights");
  require(!input.options.weighted || options_.dispatch.rows == EPRows::grouped,
          "combine: weighted = true, expected false for compact rows: they hold sums already");
  ExpertCombineInput checked = input;
  checked.options.local_combine = options_.enable_local_combine;
  const ExpertCall call =
      next_call("combine", num_combines_, stream,
                detail::combine_fingerprint(fingerprint(), checked, layout.number_));
  usability_.guard([&] {
    realign(call);
    executor_->combine(call, checked, *layout.tables_);
  });
  captured_combines_.count();
  ++epoch_;
  ++num_combines_;
}

TensorView EPAll2AllLayer::combine_input(std::int64_t rows) const {
  usability_.check("combine_input");
  require(0 <= rows && rows <= context_.capacity(), "combine_input: rows = ", rows,
          ", expected 0..", context_.capacity());
  return context_.combine_rows(static_cast<std::uint32_t>(num_combines_ % 2), rows);
}

void EPAll2AllLayer::ep_barrier_all(Stream stream, bool intra_node_only) {
  usability_.check("ep_barrier_all");
  usability_.guard([&] {
    world_.executor().synchronize(stream);
    if (intra_node_only || config_.is_intra_node()) {
      barrier_.barrier_all("ep_barrier_all");
    } else {
      world_.transport().barrier("ep_barrier_all");
    }
  });
}

std::int64_t EPAll2AllLayer::overflow() { return executor_->take_overflow(); }

void EPAll2AllLayer::check_overflow() {
  const std::int64_t rows = overflow();
  require(rows == 0, "dispatch: a rank was sent ", rows,
          " rows, expected at most fixed_rows = ", options_.fixed_rows,
          "; those that did not fit are lost");
}

void EPAll2AllLayer::finalize() {
  if (context_.finalized()) return;
  usability_.check("finalize");
  usability_.guard([&] {
    context_.finalize();
    barrier_.finalize();
  });
  usability_.end("it was finalized");
}

}  // namespace waybill
