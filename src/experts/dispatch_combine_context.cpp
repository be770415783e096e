#include "waybill/experts/dispatch_combine_context.h"

#include <limits>
#include <utility>

#include "core/move_assign.h"
#include "expert_checks.h"
#include "experts/expert_memory.h"
#include "agreement.h"
#include "waybill/core/error.h"

namespace waybill {

namespace {

constexpr const char* context_name = "DispatchCombineContext";

}  // namespace

DispatchCombineContext DispatchCombineContext::create(const World& world, const EPConfig& config,
                                                      std::int64_t capacity_factor,
                                                      const EPDispatchOptions& options) {
  const Setting mine[] = {{"capacity", concat(capacity_factor)}};
  return make(world, config, options, context_name, mine,
              [&] { return rows_of(config, capacity_factor, context_name); });
}

DispatchCombineContext DispatchCombineContext::with_rows(const World& world, const EPConfig& config,
                                                         const EPDispatchOptions& options,
                                                         std::int64_t rows) {
  const Setting mine[] = {{"rows of the windows", concat(rows)}};
  return make(world, config, options, context_name, mine, [&] { return rows; });
}

std::int64_t DispatchCombineContext::rows_of(const EPConfig& config, std::int64_t capacity_factor,
                                             const char* who) {
  const std::int64_t unit = config.max_tokens * config.topk;
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / unit;
  require(1 <= capacity_factor && capacity_factor <= most, who, ": capacity = ", capacity_factor,
          ", expected 1..", most);
  return unit * capacity_factor;
}

DispatchCombineContext DispatchCombineContext::make(const World& world, const EPConfig& config,
                                                    const EPDispatchOptions& options,
                                                    const char* who, std::span<const Setting> more,
                                                    const std::function<std::int64_t()>& num_rows,
                                                    std::int64_t slots) {
  std::int64_t rows = 0;
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
    detail::check_dtypes_of_engine(world, config, who);
    rows = num_rows();
    require(1 <= rows && rows <= std::numeric_limits<std::int32_t>::max(), who, ": rows = ", rows,
            ", expected 1..", std::numeric_limits<std::int32_t>::max());
    std::vector<Setting> mine = detail::layer_settings(config, options);
    mine.insert(mine.end(), more.begin(), more.end());
    return mine;
  });
  DispatchCombineContext context(world, config, options);
  Transport& transport = world.transport();
  ExpertMemory& memory = *context.memory_;
  memory.name = concat(" of layer ", world.next_object());
  memory.workspace_layout = expert_workspace_layout(config, options);
  memory.workspace = transport.allocate(memory.workspace_layout.total, "workspace" + memory.name);
  context.allocate_windows(rows);
  context.allocate_slabs(slots);
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
  for (SymmetricBuffer& window : memory_->dispatch_windows) {
    transport.defer_release(std::move(window.memory));
  }
  for (SymmetricBuffer& window : memory_->combine_windows) {
    transport.defer_release(std::move(window.memory));
  }
  for (SymmetricBuffer& slab : memory_->receive_slabs)
    transport.defer_release(std::move(slab.memory));
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

/// On one node, where ranks push.
void DispatchCombineContext::allocate_slabs(std::int64_t slots) {
  if (slots == 0 || !config_.is_intra_node()) return;
  memory_->slab_slots = slots;
  const std::int64_t rows = config_.max_tokens * slots;
  for (SymmetricBuffer& slab : memory_->receive_slabs) {
    slab = world_.transport().allocate(rows * config_.hidden * dtype_bytes(config_.token_dtype),
                                       "receive slab" + memory_->name);
  }
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
  if (memory.slab_slots > 0) {
    for (SymmetricBuffer& slab : memory.receive_slabs) transport.release(slab);
  }
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
                   {rows, config_.hidden}},
          .weights = {base + memory_->window.weights, config_.weight_dtype,
                      compact ? Shape{rows, config_.topk} : Shape{rows}}};
}

TensorView DispatchCombineContext::scales(std::uint32_t parity, std::int64_t rows) const {
  const std::int64_t count = num_scales(config_, options_);
  if (count == 0) return {};
  return {memory_->dispatch_windows[parity].local + memory_->window.scales,
          DType::float32,
          {rows, count}};
}

TensorView DispatchCombineContext::combine_rows(std::uint32_t parity, std::int64_t rows) const {
  return {memory_->combine_windows[parity].local, config_.token_dtype, {rows, config_.hidden}};
}

struct BarrierAllContext::State {
  State(const World& of, bool intra_node)
      : world(of),
        is_intra_node(intra_node),
        signals(of.transport().allocate_signals(of.topology().ranks_per_node, "barrier_all")) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { world.transport().defer_release(std::move(signals.memory)); }

  World world;
  bool is_intra_node;
  SignalPad signals;
  std::uint64_t epoch = 0;
};

BarrierAllContext::BarrierAllContext(const World& world, bool is_intra_node)
    : state_(std::make_unique<State>(world, is_intra_node)) {}
BarrierAllContext::BarrierAllContext(BarrierAllContext&&) noexcept = default;
BarrierAllContext& BarrierAllContext::operator=(BarrierAllContext&&) noexcept = default;
BarrierAllContext::~BarrierAllContext() = default;

void BarrierAllContext::barrier_all(const char* operation) {
  State& state = *state_;
  if (state.signals.local == nullptr) throw TransportError(concat(operation, ": it was finalized"));
  Transport& transport = state.world.transport();
  if (!state.is_intra_node) {
    transport.barrier(operation);
    return;
  }
  ++state.epoch;
  const std::int32_t count = state.world.topology().ranks_per_node;
  const std::int32_t local = to_int(state.world.rank()) % count;
  const std::int32_t first = to_int(state.world.rank()) - local;
  for (std::int32_t k = 1; k < count; ++k) {
    transport.signal(Rank{first + (local + k) % count}, {&state.signals, local}, state.epoch);
  }
  for (std::int32_t k = 1; k < count; ++k) {
    const std::int32_t peer = (local + k) % count;
    (void)transport.wait({&state.signals, peer}, state.epoch, Rank{first + peer}, operation);
  }
}

void BarrierAllContext::finalize() {
  if (state_->signals.local != nullptr) state_->world.transport().release(state_->signals);
}

}  // namespace waybill
