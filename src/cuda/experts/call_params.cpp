#include "call_params.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "../device/word_size.h"
#include "../rank/gpu_rank.h"
#include "core/memory_layout.h"
#include "core/test_hooks.h"
#include "kernels.h"
#include "runtime/executor.h"
#include "waybill/moe/expert_routing.h"

namespace waybill::cuda {
namespace {

/// Number of receive slots per source. They let tokens travel while they are counted. The number is
/// limited, because each rank has slots for the tokens of all ranks.
std::int64_t num_slot_tokens(const EPConfig& config, std::int64_t row_bytes,
                             std::int64_t scale_bytes) {
  constexpr std::int64_t max_bytes = std::int64_t{64} << 20;
  const bool bulk = row_bytes % 16 == 0 && scale_bytes % 16 == 0;
  if (!bulk || !config.is_intra_node() || config.world_size == 1) return 0;
  return std::min({std::int64_t{max_low_latency_tokens}, config.max_tokens,
                   max_bytes / (config.world_size * (row_bytes + scale_bytes))});
}

}  // namespace

std::int64_t address_of(const void* pointer) {
  return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(pointer));
}

int common_word(std::initializer_list<std::int64_t> values) {
  std::uint64_t bits = 0;
  for (const std::int64_t value : values) bits |= static_cast<std::uint64_t>(value);
  return common_word(bits);
}

RecordWorkspace::RecordWorkspace(const EPConfig& config, const EPConfig& experts,
                                 const EPDispatchOptions& options, bool low_latency) {
  const std::int64_t tokens = std::int64_t{config.world_size} * config.max_tokens;
  const std::int64_t stride = config.topk + (options.rows == EPRows::compact ? 1 : 0);
  waybill::detail::MemoryLayout parts;
  for (std::int64_t& part : counts)
    part = parts.take(config.world_size * waybill::num_counts(config) * 8);
  for (std::int64_t& part : records) part = parts.take(tokens * stride * 4);
  for (std::int64_t& part : weights) {
    part = parts.take(tokens * config.topk * dtype_bytes(config.weight_dtype));
  }
  for (std::int64_t& part : gathered)
    part = parts.take(low_latency ? tokens * config.topk * 16 : 0);
  const std::int64_t counted = options.spare_experts > 0 ? waybill::num_counts(experts) : 0;
  for (std::int64_t& part : expert_counts) part = parts.take(config.world_size * counted * 8);
  slot_row_bytes = payload_row_bytes(config, options);
  const std::int64_t scale_bytes = scale_row_bytes(config, options);
  // Quantisation is a kernel between the route and the rows.
  const bool uses_slots = !options.payload.is_quantized();
  slot_tokens = uses_slots ? num_slot_tokens(config, slot_row_bytes, scale_bytes) : 0;
  for (std::int64_t& part : receive_slots) {
    part = parts.take(config.world_size * slot_tokens * (slot_row_bytes + scale_bytes));
  }
  total = parts.total();
}

ExpertParams::ExpertParams(const GpuExpertLayer& layer)
    : layer_(layer),
      low_latency_(low_latency_route_fits(shape(0, 0))),
      max_delay_ns_(static_cast<std::uint32_t>(waybill::detail::test_hooks().delay_ns)),
      workspace_(layer.config, layer.experts, layer.options, low_latency_) {
  const EPConfig& config = layer.config;
  const EPDispatchOptions& options = layer.options;
  const cudaStream_t stream = layer_.gpu->stream();
  state_ = device_memory(moe_state_bytes(config.world_size), stream);
  tile_counts_ =
      device_memory(std::int64_t{layer_.gpu->num_sms()} * waybill::num_counts(config) * 4, stream);
  const std::int64_t row_bytes = config.hidden * dtype_bytes(config.token_dtype);
  nan_row_ = device_memory(row_bytes, stream);
  cuda_check(cudaMemsetAsync(nan_row_.get(), 0xFF, row_bytes, stream), "making a row of NaN");
  cuda_check(cudaStreamSynchronize(stream), "making a row of NaN");
  overflow_ = pinned_memory(sizeof(HostOverflow));
  *overflow() = 0;
  if (options.payload.is_quantized() && config.is_intra_node()) {
    elements_ = device_memory(config.max_tokens * payload_row_bytes(config, options), stream);
    scales_ = device_memory(config.max_tokens * scale_row_bytes(config, options), stream);
  }
  const std::int64_t world = config.world_size;
  records_ = layer_.transport.allocate(workspace_.total, "expert records");
  channels_ =
      layer_.transport.allocate_signals(world * max_channels + 2 * world, "expert channels");
}

ExpertParams::~ExpertParams() {
  layer_.transport.defer_release(std::move(records_.memory));
  layer_.transport.defer_release(std::move(channels_.memory));
  layer_.transport.defer_release({state_, tile_counts_, nan_row_, overflow_, elements_, scales_});
}

void ExpertParams::release() {
  layer_.transport.release(records_);
  layer_.transport.release(channels_);
}

MoeArrive ExpertParams::arrive(const ExpertCall& call, FaultKind kind) const {
  MoeArrive m{};
  m.arrive.rank = layer_.config.rank;
  m.arrive.world_size = layer_.config.world_size;
  m.arrive.kind = kind;
  m.state = static_cast<MoeState*>(state_.get());
  m.arrive.state = &m.state->call;
  m.arrive.sink = layer_.gpu->sink(layer_.share);
  const std::int64_t slots =
      static_cast<std::int64_t>(ExpertSignal::entered) * layer_.config.world_size;
  m.arrive.own_arrivals = layer_.memory.signals.local + slots;
  m.arrive.first_rank = first_rank();
  m.arrive.node_ranks = layer_.config.local_world_size;
  m.arrive.arrivals = near_peers_of<std::uint64_t>(layer_.memory.signals,
                                                   slots * std::int64_t{sizeof(std::uint64_t)}, 0,
                                                   layer_.config.world_size);
  std::ranges::copy(pack_fingerprint(call.fingerprint), m.arrive.fingerprint.words);
  m.arrive.fingerprint.first_slot = static_cast<std::int32_t>(
      first_fingerprint_slot(num_layer_signals(layer_.config.world_size)) - slots);
  m.arrive.fingerprint.crosses_nodes =
      !layer_.config.is_intra_node();  // the network path that begins a call carries the words
  m.parity = call.parity;
  m.max_delay_ns = max_delay_ns_;
  return m;
}

MoeShape ExpertParams::shape(const GpuExpertRouting& routing) const {
  return shape(routing.num_tokens(), routing.tables().capacity_rows);
}

MoeShape ExpertParams::experts_shape(std::int64_t num_tokens) const {
  MoeShape s = shape(num_tokens, 0);
  s.num_experts = layer_.experts.num_experts;
  s.experts_per_rank = layer_.experts.num_experts_per_rank();
  s.compact = 0;  // no rows, so their number per rank is not counted
  if (!layer_.reaches_all) return s;
  s.num_nodes = 1;
  s.node_ranks = s.world_size;
  s.first_rank = 0;
  return s;
}

MoeShape ExpertParams::shape(std::int64_t num_tokens, std::int64_t capacity_rows) const {
  MoeShape s{};
  s.rank = layer_.config.rank;
  s.world_size = layer_.config.world_size;
  s.num_experts = layer_.config.num_experts;
  s.experts_per_rank = layer_.config.num_experts_per_rank();
  s.topk = layer_.config.topk;
  s.num_tokens = static_cast<std::int32_t>(num_tokens);
  s.max_tokens = static_cast<std::int32_t>(layer_.config.max_tokens);
  s.compact = layer_.options.rows == EPRows::compact ? 1 : 0;
  s.alignment = static_cast<std::int32_t>(layer_.options.expert_alignment);
  s.num_nodes = layer_.config.num_nodes();
  s.node_ranks = layer_.config.local_world_size;
  s.first_rank = first_rank();
  s.capacity_rows = capacity_rows;
  return s;
}

/// The shape of one node whose ranks own all tokens that they forward, for RowsParams.
MoeShape ExpertParams::node_shape(const GpuExpertRouting& routing) const {
  MoeShape s = shape(routing);
  if (s.num_nodes == 1) return s;
  s.rank -= s.first_rank;
  s.world_size = s.node_ranks;
  s.max_tokens *= s.num_nodes;
  s.num_tokens = s.max_tokens;
  return s;
}

/// The weights of all tokens that this rank places; null without weights.
const std::byte* ExpertParams::weights_of(const ExpertDispatchInput& input) const {
  const bool forwarded = is_given(input.weights) && !layer_.config.is_intra_node();
  return forwarded ? layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_weights
                   : input.weights.data;
}

/// The symmetric memory of the node's ranks, from a byte on.
NearPeers<std::byte> ExpertParams::record_parts(std::int64_t offset) const {
  return near_peers_of<std::byte>(records_, offset, first_rank(), layer_.config.local_world_size);
}

RouteParams ExpertParams::route(const ExpertCall& call, const ExpertDispatchInput& input,
                                GpuExpertTables& tables) const {
  GpuExpertRouting& made = *tables.being_made();
  RouteParams params{};
  params.m = arrive(call, FaultKind::moe_dispatch);
  params.shape = shape(made);
  params.ids = input.ids.data;
  params.wide_ids = input.ids.dtype == DType::int64;
  const bool of_slots = layer_.options.spare_experts > 0;
  params.dropped_id = layer_.dropped_id();
  params.scatter = input.full_scatter_indices.data;
  params.wide_scatter = input.full_scatter_indices.dtype == DType::int64;
  if (params.scatter != nullptr) params.scatter_tokens = input.full_scatter_indices.shape[0];
  const std::int64_t no_limit = std::numeric_limits<std::int32_t>::max();
  params.fitting_rows = static_cast<std::int32_t>(
      call.may_grow ? no_limit : std::min(no_limit, layer_.memory.capacity_rows));
  params.max_per_expert = static_cast<std::int32_t>(
      call.max_per_expert == 0 || of_slots ? no_limit : std::min(no_limit, call.max_per_expert));
  params.weights = weights_of(input);
  params.takes_weights = is_given(input.weights);
  if (!layer_.config.is_intra_node()) {
    params.ids = layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_ids;
    params.wide_ids = false;
  }
  params.weight_bytes = static_cast<std::int32_t>(dtype_bytes(layer_.config.weight_dtype));
  const std::int64_t counts = workspace_.counts[call.parity];
  const std::int64_t records = workspace_.records[call.parity];
  const std::int64_t weights = workspace_.weights[call.parity];
  const std::int64_t gathered = workspace_.gathered[call.parity];
  params.peers = record_parts(0);
  params.counts = counts;
  params.records = records;
  params.sent_weights = weights;
  params.gathered = gathered;
  params.own_counts = reinterpret_cast<std::uint64_t*>(records_.local + counts);
  params.own_records = reinterpret_cast<std::int32_t*>(records_.local + records);
  params.own_sent_weights = records_.local + weights;
  params.own_gathered = reinterpret_cast<std::uint64_t*>(records_.local + gathered);
  params.tile_counts = static_cast<std::int32_t*>(tile_counts_.get());
  const RoutingTables& layout = made.tables();
  params.out_ids = made.part(layout.ids);
  params.dst_rows = made.part(layout.dst_rows);
  params.out_weights = tables.weight_data();
  params.addresses = made.part<std::int64_t>(layout.addresses);
  params.num_input_tokens = made.part(layout.num_input_tokens);
  params.splits = made.part(layout.splits);
  params.segment_offsets = made.part(layout.segment_offsets);
  params.expert_counts = made.part(layout.expert_counts);
  params.expert_offsets = made.part(layout.expert_offsets);
  params.num_recv_rows = made.part(layout.num_recv_rows);
  params.host = made.counts();
  params.ticket = made.ticket();
  return params;
}

RouteParams ExpertParams::count(const ExpertCall& call, const ExpertDispatchInput& input,
                                GpuExpertTables& tables) const {
  RouteParams params = route(call, input, tables);
  params.shape = experts_shape(params.shape.num_tokens);
  if (layer_.reaches_all) {
    params.m.arrive.first_rank = 0;
    params.m.arrive.node_ranks = params.shape.node_ranks;
    params.m.arrive.fingerprint.crosses_nodes = false;
    params.peers = near_peers_of<std::byte>(records_, 0, 0, params.shape.node_ranks);
    params.ids = input.ids.data;
    params.wide_ids = input.ids.dtype == DType::int64;
    params.dropped_id = layer_.options.dropped(layer_.experts);
  }
  if (call.max_per_expert > 0) {
    params.max_per_expert = static_cast<std::int32_t>(
        std::min<std::int64_t>(params.max_per_expert, call.max_per_expert));
  }
  params.counts = workspace_.expert_counts[call.parity];
  params.own_counts = reinterpret_cast<std::uint64_t*>(records_.local + params.counts);
  return params;
}

EnterParams ExpertParams::enter(const ExpertCall& call, const ExpertDispatchInput& input,
                                GpuExpertTables& tables) const {
  const GpuExpertRouting& routing = tables.routing();
  EnterParams params{};
  params.m = arrive(call, FaultKind::moe_dispatch);
  params.shape = shape(routing);
  params.weights = weights_of(input);
  params.weight_bytes = static_cast<std::int32_t>(dtype_bytes(layer_.config.weight_dtype));
  params.addresses = routing.part<std::int64_t>(routing.tables().addresses);
  params.out_weights = tables.weight_data();
  params.sent_weights = record_parts(workspace_.weights[call.parity]);
  return params;
}

RowsParams ExpertParams::rows(const ExpertCall& call, const ExpertDispatchInput& input,
                              const GpuExpertTables& tables) const {
  const GpuExpertRouting& routing = tables.routing();
  RowsParams params{};
  params.m = arrive(call, FaultKind::moe_dispatch);
  params.shape = node_shape(routing);
  const SymmetricBuffer& window = layer_.memory.dispatch_windows[call.parity];
  const std::int32_t first = first_rank();
  const std::int32_t ranks = layer_.config.local_world_size;
  params.windows = near_peers_of<std::byte>(window, layer_.memory.window.rows, first, ranks);
  params.own_window = window.local + layer_.memory.window.rows;
  params.channels = near_peers_of<std::uint64_t>(channels_, 0, first, ranks);
  params.own_channels = channels_.local;
  if (workspace_.slot_tokens > 0) {
    params.receive_slots.tokens = static_cast<std::int32_t>(workspace_.slot_tokens);
    params.receive_slots.scales_offset =
        layer_.config.world_size * workspace_.slot_tokens * workspace_.slot_row_bytes;
    const std::int64_t slots = workspace_.receive_slots[call.parity];
    params.receive_slots.rows = record_parts(slots);
    params.receive_slots.own_rows = records_.local + slots;
    params.receive_slots.is_all = low_latency_;
    params.receive_slots.ids = input.ids.data;
    params.receive_slots.wide_ids = input.ids.dtype == DType::int64;
  }
  params.scales_offset = layer_.memory.window.scales - layer_.memory.window.rows;
  params.tags = reinterpret_cast<RowTag*>(window.local + layer_.memory.window.tags);
  params.weights = window.local + layer_.memory.window.weights;
  params.topk = reinterpret_cast<std::int32_t*>(window.local + layer_.memory.window.topk);
  const RoutingTables& layout = routing.tables();
  params.addresses = routing.part<std::int64_t>(layout.addresses);
  params.records = routing.part(layout.records);
  if (is_given(input.weights)) {
    params.sent_weights = records_.local + workspace_.weights[call.parity];
  }
  params.weight_bytes = static_cast<std::int32_t>(dtype_bytes(layer_.config.weight_dtype));
  params.num_input_tokens = routing.part(layout.num_input_tokens);
  params.expert_counts = routing.part(layout.expert_counts);
  params.expert_offsets = routing.part(layout.expert_offsets);
  params.max_recv_rows = routing.part(layout.num_recv_rows) + layer_.config.world_size;
  params.overflow = overflow();
  params.known_topk = routing.part(routing.tables().topk);
  if (tables.being_made() != nullptr) fill_tables(call, *tables.being_made(), params);
  return params;
}

/// Sets the tables that the first dispatch of a routing writes.
void ExpertParams::fill_tables(const ExpertCall& call, GpuExpertRouting& made,
                               RowsParams& params) const {
  const RoutingTables& tables = made.tables();
  params.fills_tables = true;
  params.records =
      reinterpret_cast<const std::int32_t*>(records_.local + workspace_.records[call.parity]);
  params.kept_records = made.part(tables.records);
  params.kept_tags = made.part<RowTag>(tables.tags);
  params.primary_rows = made.part(tables.primary_rows);
  params.topk_slot_rows = made.part(tables.topk_slot_rows);
  params.compact_to_grouped = made.part(tables.compact_to_grouped);
  params.grouped_to_compact = made.part(tables.grouped_to_compact);
  params.kept_topk = made.part(tables.topk);
}

StageParams ExpertParams::stage(const ExpertCall& call, const ExpertCombineInput& input,
                                const GpuExpertTables& tables) const {
  const GpuExpertRouting& routing = tables.routing();
  StageParams params{};
  params.shape = shape(routing);
  params.sink = layer_.gpu->sink(layer_.share);
  params.state = static_cast<const MoeState*>(state_.get());
  params.input = input.rows.data;
  params.num_rows = input.rows.shape[0];
  params.window = layer_.memory.combine_windows[call.parity].local;
  params.row_bytes = layer_.config.hidden * dtype_bytes(layer_.config.token_dtype);
  params.num_recv_rows = routing.part(routing.tables().num_recv_rows) + layer_.config.rank;
  params.num_input_tokens = routing.part(routing.tables().num_input_tokens);
  return params;
}

CombineParams ExpertParams::combine(const ExpertCall& call, const ExpertCombineInput& input,
                                    const GpuExpertTables& tables) const {
  const GpuExpertRouting& routing = tables.routing();
  CombineParams params{};
  params.m = arrive(call, FaultKind::moe_combine);
  params.shape = node_shape(routing);
  params.addresses = routing.part<std::int64_t>(routing.tables().addresses);
  params.windows =
      peers_of<const std::byte>(layer_.memory.combine_windows[call.parity].table + first_rank(), 0);
  params.lost_row = static_cast<const std::byte*>(nan_row_.get());
  const bool compact = layer_.options.rows == EPRows::compact;
  const bool local_sums = input.options.local_combine && layer_.config.is_intra_node();
  params.primary_only = compact || local_sums ? 1 : 0;
  params.row_bytes = layer_.config.hidden * dtype_bytes(layer_.config.token_dtype);
  if (input.options.weighted && !local_sums) params.weights = tables.weight_data();
  if (!layer_.config.is_intra_node()) {
    params.in_call = true;
    return params;
  }
  for (std::size_t i = 0; i < input.biases.size(); ++i) params.biases[i] = input.biases[i].data;
  params.output = input.output.data;
  return params;
}

}  // namespace waybill::cuda
