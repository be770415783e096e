#include "waybill/experts/dispatch_combine_context.h"

#include <limits>
#include <utility>

#include "agreement.h"
#include "core/memory_layout.h"
#include "experts/expert_executor.h"
#include "waybill/core/error.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {

namespace {

constexpr const char* context_name = "DispatchCombineContext";
constexpr std::int64_t int_bytes = sizeof(std::int32_t);
constexpr std::int64_t max_rows = std::numeric_limits<std::int32_t>::max();

/// Refuses sums in float64 on GPUs, which have none.
/// @throws Unsupported
void check_dtypes(const World& world, const EPConfig& config, const char* who) {
  if (dynamic_cast<ExpertExecutorFactory*>(&world.executor()) == nullptr) return;
  for (const auto& [name, dtype] :
       {std::pair{"token_dtype", config.token_dtype}, {"weight_dtype", config.weight_dtype}}) {
    if (dtype != DType::float64) continue;
    throw Unsupported(concat(who, ": ", name, " = float64 on GPUs, expected bfloat16, float16 or ",
                             "float32: float64 is for ranks in host memory"));
  }
}

/// The checks of a layer's options that do not concern rows.
void check_options(const EPLayerOptions& options, const char* who) {
  require(options.num_sms >= 1, who, ": num_sms = ", options.num_sms, ", expected >= 1");
  require(options.fixed_rows >= 0, who, ": fixed_rows = ", options.fixed_rows, ", expected >= 0");
  require(options.max_per_expert >= 0, who, ": max_per_expert = ", options.max_per_expert,
          ", expected >= 0");
  require(!options.push_combine, who, ": push_combine = true, expected false: combines pull since ",
          "0.2, and the option goes in 0.3");
}

/// The first rows of windows that may grow.
std::int64_t rows_of(const EPConfig& config, std::int64_t capacity_factor, const char* who) {
  const std::int64_t unit = config.max_tokens * config.topk;
  require(1 <= capacity_factor && capacity_factor <= max_rows / unit, who,
          ": capacity = ", capacity_factor, ", expected 1..", max_rows / unit);
  return unit * capacity_factor;
}

}  // namespace

ExpertWindowLayout expert_window_layout(const EPConfig& config, const EPDispatchOptions& options,
                                        std::int64_t capacity_rows) {
  const bool compact = options.rows == EPRows::compact;
  const std::int64_t weights = compact ? config.topk : 1;
  detail::MemoryLayout parts;
  ExpertWindowLayout layout;
  layout.rows = parts.take(capacity_rows * payload_row_bytes(config, options));
  layout.tags = parts.take(capacity_rows * static_cast<std::int64_t>(sizeof(RowTag)));
  layout.scales = parts.take(capacity_rows * scale_row_bytes(config, options));
  layout.weights = parts.take(capacity_rows * weights * dtype_bytes(config.weight_dtype));
  layout.topk = parts.take(compact ? capacity_rows * config.topk * int_bytes : 0);
  layout.total = parts.total();
  layout.row_bytes = payload_row_bytes(config, options);
  layout.scale_bytes = scale_row_bytes(config, options);
  layout.weight_bytes = dtype_bytes(config.weight_dtype);
  layout.weights_per_row = weights;
  return layout;
}

ExpertWorkspaceLayout expert_workspace_layout(const EPConfig& config,
                                              const EPDispatchOptions& options) {
  detail::MemoryLayout parts;
  ExpertWorkspaceLayout layout;
  for (std::int64_t& counts : layout.counts) {
    counts = parts.take(config.world_size * num_counts(config) * int_bytes);
  }
  const std::int64_t of_slots =
      options.spare_experts > 0 ? num_counts(slot_config(config, options)) : 0;
  for (std::int64_t& counts : layout.slot_counts) {
    counts = parts.take(config.world_size * of_slots * int_bytes);
  }
  // On one node nothing is forwarded, and every part below is empty.
  const std::int64_t nodes = config.is_intra_node() ? 0 : config.num_nodes();
  const std::int64_t tokens = nodes * config.max_tokens;
  layout.forward_rows = parts.take(tokens * payload_row_bytes(config, options));
  layout.forward_scales = parts.take(tokens * scale_row_bytes(config, options));
  layout.forward_weights = parts.take(tokens * config.topk * dtype_bytes(config.weight_dtype));
  layout.forward_ids = parts.take(tokens * config.topk * int_bytes);
  layout.partial_sums = parts.take(tokens * config.hidden * dtype_bytes(config.token_dtype));
  layout.sums = parts.take(tokens * config.hidden * dtype_bytes(config.token_dtype));
  layout.total = parts.total();
  return layout;
}

DispatchCombineContext DispatchCombineContext::create(const World& world, const EPConfig& config,
                                                      std::int64_t capacity_factor,
                                                      const EPDispatchOptions& options) {
  return make(world, config, {.dispatch = options, .capacity_factor = capacity_factor},
              context_name);
}

DispatchCombineContext DispatchCombineContext::with_rows(const World& world, const EPConfig& config,
                                                         const EPDispatchOptions& options,
                                                         std::int64_t rows) {
  return make(world, config, {.dispatch = options, .fixed_rows = rows}, context_name, rows);
}

DispatchCombineContext DispatchCombineContext::make(const World& world, const EPConfig& config,
                                                    const EPLayerOptions& layer, const char* who,
                                                    std::optional<std::int64_t> given_rows) {
  std::int64_t rows = 0;
  const EPDispatchOptions& options = layer.dispatch;
  agree_on_settings(world.transport(), who, [&] {
    config.check(who);
    options.check(config, who);
    require(config.world_size == world.world_size(), who, ": world_size = ", config.world_size,
            ", expected ", world.world_size(), ", as the world has");
    require(config.local_world_size == world.topology().ranks_per_node, who,
            ": local_world_size = ", config.local_world_size, ", expected ",
            world.topology().ranks_per_node, ", as the world has");
    require(config.rank == to_int(world.rank()), who, ": rank = ", config.rank, ", expected ",
            world.rank(), ", as in the world");
    check_dtypes(world, config, who);
    if (!given_rows) check_options(layer, who);
    rows = given_rows             ? *given_rows
           : layer.fixed_rows > 0 ? layer.fixed_rows
                                  : rows_of(config, layer.capacity_factor, who);
    require(1 <= rows && rows <= max_rows, who, ": rows = ", rows, ", expected 1..", max_rows);
    return detail::layer_settings(config, layer);
  });
  DispatchCombineContext context(world, config, options);
  Transport& transport = world.transport();
  ExpertMemory& memory = *context.memory_;
  memory.name = concat(" of layer ", world.next_object());
  memory.workspace_layout = expert_workspace_layout(config, options);
  memory.workspace = transport.allocate(memory.workspace_layout.total, "workspace" + memory.name);
  context.allocate_windows(rows);
  memory.signals = transport.allocate_signals(
      with_fingerprints(num_layer_signals(config.world_size), config.world_size),
      "signals" + memory.name);
  return context;
}

DispatchCombineContext::DispatchCombineContext(const World& world, const EPConfig& config,
                                               const EPDispatchOptions& options)
    : world_(world),
      config_(config),
      options_(options),
      memory_(std::make_unique<ExpertMemory>()) {}

DispatchCombineContext::DispatchCombineContext(DispatchCombineContext&& other) noexcept = default;
DispatchCombineContext& DispatchCombineContext::operator=(DispatchCombineContext&& other) noexcept {
  detail::move_assign(*this, std::move(other));
  return *this;
}

std::int64_t DispatchCombineContext::capacity_rows() const noexcept {
  return memory_->capacity_rows;
}
bool DispatchCombineContext::finalized() const noexcept {
  return memory_->signals.local == nullptr;
}

DispatchCombineContext::~DispatchCombineContext() {
  if (memory_ == nullptr) return;
  Transport& transport = world_.transport();
  for (auto& pair : {std::span(memory_->dispatch_windows), std::span(memory_->combine_windows)}) {
    for (SymmetricBuffer& buffer : pair) transport.defer_release(std::move(buffer.memory));
  }
  for (SymmetricBuffer& window : memory_->retired)
    transport.defer_release(std::move(window.memory));
  transport.defer_release(std::move(memory_->workspace.memory));
  transport.defer_release(std::move(memory_->signals.memory));
}

void DispatchCombineContext::allocate_windows(std::int64_t rows) {
  Transport& transport = world_.transport();
  ExpertMemory& memory = *memory_;
  const ExpertWindowLayout layout = expert_window_layout(config_, options_, rows);
  const std::int64_t combine_bytes = rows * config_.hidden * dtype_bytes(config_.token_dtype);
  SymmetricBuffer grown[4];
  for (SymmetricBuffer& window : std::span(grown).first(2)) {
    window = transport.allocate(layout.total, "dispatch window" + memory.name);
  }
  for (SymmetricBuffer& window : std::span(grown).last(2)) {
    window = transport.allocate(combine_bytes, "combine window" + memory.name);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    for (auto [place, fresh] : {std::pair{&memory.dispatch_windows[i], &grown[i]},
                                {&memory.combine_windows[i], &grown[2 + i]}}) {
      if (place->local != nullptr) memory_->retired.push_back(std::move(*place));
      *place = std::move(*fresh);
    }
  }
  memory.window = layout;
  memory.capacity_rows = rows;
}

void DispatchCombineContext::finalize() {
  if (finalized()) return;
  world_.executor().finish();
  Transport& transport = world_.transport();
  ExpertMemory& memory = *memory_;
  for (SymmetricBuffer& window : memory_->retired) transport.release(window);
  memory_->retired.clear();
  for (SymmetricBuffer& window : memory.dispatch_windows) transport.release(window);
  for (SymmetricBuffer& window : memory.combine_windows) transport.release(window);
  transport.release(memory.workspace);
  transport.release(memory.signals);
}

DispatchOutputBuffers DispatchCombineContext::reallocate_dispatch_output_buf(
    std::int64_t dispatch_recv_tokens) {
  constexpr const char* who = "reallocate_dispatch_output_buf";
  if (finalized()) throw TransportError(concat(who, ": the context was finalized"));
  require(
      0 <= dispatch_recv_tokens && dispatch_recv_tokens <= std::numeric_limits<std::int32_t>::max(),
      who, ": dispatch_recv_tokens = ", dispatch_recv_tokens, ", expected 0..",
      std::numeric_limits<std::int32_t>::max());
  if (dispatch_recv_tokens > capacity_rows()) {
    for (SymmetricBuffer& window : memory_->retired) world_.transport().release(window);
    memory_->retired.clear();
    allocate_windows(dispatch_recv_tokens);
  }
  return buffers(0, capacity_rows());
}

DispatchOutputBuffers DispatchCombineContext::buffers(std::uint32_t parity,
                                                      std::int64_t rows) const {
  std::byte* const base = memory_->dispatch_windows[parity].local;
  const bool compact = options_.rows == EPRows::compact;
  return {.rows = {base + memory_->window.rows,
                   payload_dtype(config_, options_),
                   {rows, payload_columns(config_, options_)}},
          .weights = {base + memory_->window.weights, config_.weight_dtype,
                      compact ? Shape{rows, config_.topk} : Shape{rows}}};
}

TensorView DispatchCombineContext::scales(std::uint32_t parity, std::int64_t rows) const {
  const std::int64_t count = num_scales(config_, options_);
  if (count == 0) return {};
  return {memory_->dispatch_windows[parity].local + memory_->window.scales,
          options_.payload.scale_dtype(),
          {rows, count}};
}

TensorView DispatchCombineContext::combine_rows(std::uint32_t parity, std::int64_t rows) const {
  return {memory_->combine_windows[parity].local, config_.token_dtype, {rows, config_.hidden}};
}

BarrierAllContext::BarrierAllContext(const World& world, bool is_intra_node)
    : world_(world),
      is_intra_node_(is_intra_node),
      signals_(new SignalPad(world.transport().allocate_signals(world.topology().ranks_per_node,
                                                                "barrier_all")),
               [of = world](SignalPad* pad) {
                 of.transport().defer_release(std::move(pad->memory));
                 delete pad;
               }) {}

BarrierAllContext::BarrierAllContext(BarrierAllContext&&) noexcept = default;
BarrierAllContext& BarrierAllContext::operator=(BarrierAllContext&&) noexcept = default;
BarrierAllContext::~BarrierAllContext() = default;

void BarrierAllContext::barrier_all(const char* operation) {
  if (signals_->local == nullptr) throw TransportError(concat(operation, ": it was finalized"));
  Transport& transport = world_.transport();
  if (!is_intra_node_) {
    transport.barrier(operation);
    return;
  }
  const std::int32_t count = world_.topology().ranks_per_node;
  const std::int32_t first = to_int(world_.rank()) / count * count;
  wait_for_ranks(transport, *signals_, 0, first, count, ++epoch_, operation);
}

void BarrierAllContext::finalize() {
  if (signals_->local != nullptr) world_.transport().release(*signals_);
}

}  // namespace waybill
