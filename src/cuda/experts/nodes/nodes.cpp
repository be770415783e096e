#include "nodes.h"

#include <algorithm>
#include <span>
#include <utility>

#include "../kernels.h"
#include "core/memory_layout.h"
#include "runtime/executor.h"
#include "schedule/workspace_phase.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

/// With at least so many tokens sums are made in pieces. Each piece travels while the next one is
/// made.
constexpr std::int64_t tokens_in_pieces = 2048;
constexpr std::int32_t pieces_of_node = 4;

/// Upper limit of puts that carry whole parts to one other node.
std::int64_t max_whole_puts(const EPConfig& config) {
  return max_node_parts * (1 + config.max_tokens * config.topk * 8 / max_put_bytes);
}

}  // namespace

ExpertNodes::ExpertNodes(const GpuExpertLayer& layer, NetworkPath& path, const ExpertParams& params)
    : layer_(layer),
      path_(path),
      params_(params),
      by_phases_(path.needs_phases()),
      own_node_(layer.config.rank / layer.config.local_world_size),
      sum_bytes_(layer.config.hidden * dtype_bytes(layer.config.token_dtype)),
      token_bytes_(payload_row_bytes(layer.config, layer.options)),
      scale_bytes_(scale_row_bytes(layer.config, layer.options)) {
  cuda_check(prepare_nodes(layer_.config.token_dtype), "loading kernels");
  make_program();
  pad_ = layer_.transport.allocate_signals(
      std::int64_t{layer_.config.num_nodes()} * (1 + program_.num_chunks), "expert chunks");
}

ExpertNodes::~ExpertNodes() {
  layer_.transport.defer_release(std::move(pad_.memory));
  layer_.transport.defer_release({program_memory_});
}

void ExpertNodes::release() { layer_.transport.release(pad_); }

void ExpertNodes::make_program() {
  const std::int64_t tokens = layer_.config.max_tokens;
  const std::int32_t shift = chunk_shift(std::max(token_bytes_, sum_bytes_), tokens);
  const std::int64_t chunks = num_chunks(tokens, shift);
  program_.chunk_shift = shift;
  program_.num_chunks = static_cast<std::int32_t>(chunks);
  program_.whole_slot = 0;
  program_.chunk_slot = layer_.config.num_nodes();
  if (tokens >= tokens_in_pieces) {
    program_.ready_pieces = pieces_of_node;
    const std::int64_t each = (tokens + pieces_of_node - 1) / pieces_of_node;
    program_.piece_tokens = static_cast<std::int32_t>(num_chunks(each, shift) << shift);
  }
  const std::int64_t others = other_nodes();
  const std::int64_t steps = others * (1 + chunks);
  const std::int64_t row_puts = (chunks << shift) * max_node_parts;
  const std::int64_t puts = others * (max_whole_puts(layer_.config) + row_puts);
  waybill::detail::MemoryLayout parts;
  const std::int64_t put_table = parts.take(puts, sizeof(NetworkPut));
  const std::int64_t step_table = parts.take(steps, sizeof(NetworkStep));
  const std::int64_t waits = parts.take(steps, sizeof(BatchSlot));
  const std::int64_t signals = parts.take(steps, sizeof(BatchSlot));
  const std::int64_t done = parts.take(steps, sizeof(unsigned));
  const std::int64_t state = parts.take(sizeof(PathState));
  const std::int64_t ready = parts.take(2 + others * program_.ready_pieces, sizeof(std::uint64_t));
  program_memory_ = device_memory(parts.total(), layer_.gpu->stream());
  auto* const base = static_cast<std::byte*>(program_memory_.get());
  program_.state = reinterpret_cast<PathState*>(base + state);
  program_.steps = reinterpret_cast<NetworkStep*>(base + step_table);
  program_.puts = reinterpret_cast<NetworkPut*>(base + put_table);
  program_.waits = reinterpret_cast<BatchSlot*>(base + waits);
  program_.signals = reinterpret_cast<BatchSlot*>(base + signals);
  done_ = reinterpret_cast<unsigned*>(base + done);
  ready_ = reinterpret_cast<std::uint64_t*>(base + ready);
}

/// The tables of the program that the parameters describe.
PathTables ExpertNodes::path_tables(const ListPutsParams& params) const {
  const std::int32_t whole_steps = params.num_whole > 0 ? other_nodes() : 0;
  const std::int32_t row_steps =
      params.filter != NodeFilter::none ? other_nodes() * params.num_chunks : 0;
  return {.num_puts = nullptr,
          .steps = params.steps,
          .puts = params.puts,
          .waits = params.waits,
          .signals = params.signals,
          .done = done_,
          .ready = ready_,
          .num_steps = whole_steps + row_steps,
          .first_steps = whole_steps,
          .steps_of_peer = params.num_chunks,
          .one_block_of_peer = false};
}

std::vector<SumPiece> ExpertNodes::pieces() const {
  std::vector<SumPiece> pieces;
  const std::int64_t tokens = layer_.config.max_tokens;
  const std::int64_t nodes = layer_.config.num_nodes();
  const std::int64_t own = own_node_;
  if (program_.ready_pieces == 0) {
    pieces.push_back({(own + 1) * tokens, (nodes - own - 1) * tokens, 0});
    pieces.push_back({0, own * tokens, 1});
    return pieces;
  }
  for (std::int32_t k = 0; k < other_nodes(); ++k) {
    const std::int64_t node = (own + 1 + k) % nodes;
    for (std::int32_t i = 0; i < program_.ready_pieces; ++i) {
      const std::int64_t first = std::min(std::int64_t{i} * program_.piece_tokens, tokens);
      const std::int64_t end = std::min(first + program_.piece_tokens, tokens);
      pieces.push_back({node * tokens + first, end - first, k * program_.ready_pieces + i});
    }
  }
  return pieces;
}

void ExpertNodes::count_rows(const ExpertCall& call, GpuExpertRouting& made) const {
  if (!by_phases_ || !are_known(call)) return;
  made.expect_node_rows();
  NodeRowsParams params{};
  params.shape = params_.shape(made);
  params.ids = reinterpret_cast<const std::int32_t*>(layer_.memory.workspace.local +
                                                     layer_.memory.workspace_layout.forward_ids);
  params.tokens = made.part(made.tables().node_tokens);
  params.counts = made.part(made.tables().node_counts);
  params.host = made.node_counts();
  params.ticket = made.ticket();
  layer_.gpu->check(launch_node_rows(params, stream_of(call)), "launching a kernel",
                    call.operation);
}

/// The rows that go to each node, or those that come from each.
MoveNodeRowsParams ExpertNodes::rows_of(const GpuExpertRouting& routing, bool come) const {
  const std::int64_t nodes = come ? layer_.config.num_nodes() : 0;
  MoveNodeRowsParams params{};
  params.shape = params_.shape(routing);
  params.tokens = routing.part(routing.tables().node_tokens) + nodes * layer_.config.max_tokens;
  params.counts = routing.part(routing.tables().node_counts) + nodes;
  return params;
}

/// No other kernel runs meanwhile.
int ExpertNodes::pack_blocks() const {
  return std::max(1, 2 * layer_.gpu->num_sms() / layer_.share);
}

void ExpertNodes::move(const MoveNodeRowsParams& params, int blocks, cudaStream_t stream,
                       const char* operation) const {
  const int word = common_word({address_of(params.from), params.from_node_bytes,
                                address_of(params.to), params.to_node_bytes, params.row_bytes});
  layer_.gpu->check(launch_move_node_rows(params, word, blocks, stream), "launching a kernel",
                    operation);
}

/// Packs from this rank's slice into the array of sums, and unpacks from the array of partial sums
/// to where rows are forwarded.
ExpertNodes::Phase ExpertNodes::pack_tokens(const ExpertCall& call, const GpuExpertRouting& routing,
                                            int sms) const {
  const ExpertWorkspaceLayout& layout = layer_.memory.workspace_layout;
  std::byte* const base = layer_.memory.workspace.local;
  const std::int64_t slice = layer_.config.max_tokens * sum_bytes_;
  const int blocks = pack_blocks();
  Phase phase{.rows = routing.wait_node_rows(), .parts = {}, .unpack = {}};
  std::vector<MoveNodeRowsParams> unpacks;
  const auto add = [&](std::int64_t part, std::int64_t row_bytes, std::int64_t staged) {
    MoveNodeRowsParams pack = rows_of(routing, false);
    pack.packs = true;
    pack.from = base + part + own_slice() * row_bytes;
    pack.to = base + layout.sums + staged;
    pack.to_node_bytes = slice;
    pack.row_bytes = row_bytes;
    move(pack, blocks, stream_of(call), call.operation);
    MoveNodeRowsParams unpack = rows_of(routing, true);
    unpack.from = base + layout.partial_sums + staged;
    unpack.from_node_bytes = slice;
    unpack.to = base + part;
    unpack.to_node_bytes = layer_.config.max_tokens * row_bytes;
    unpack.row_bytes = row_bytes;
    unpacks.push_back(unpack);
    phase.parts.push_back({.from_bytes = layout.sums + staged,
                           .from_node_bytes = slice,
                           .to_bytes = layout.partial_sums + staged,
                           .to_node_bytes = slice,
                           .row_bytes = row_bytes});
  };
  add(layout.forward_rows, token_bytes_, 0);
  if (scale_bytes_ > 0)
    add(layout.forward_scales, scale_bytes_, layer_.config.max_tokens * token_bytes_);
  phase.unpack = [this, unpacks, sms, operation = call.operation](cudaStream_t stream) {
    for (const MoveNodeRowsParams& unpack : unpacks) move(unpack, sms, stream, operation);
  };
  return phase;
}

/// Packs the sums into the array of partial sums, where nothing has arrived yet, and sends them
/// from there to the receivers' arrays of sums. When they have been sent, what has arrived is
/// unpacked into the array of partial sums.
ExpertNodes::Phase ExpertNodes::pack_sums(const ExpertCall& call, const GpuExpertRouting& routing,
                                          int sms) const {
  const ExpertWorkspaceLayout& layout = layer_.memory.workspace_layout;
  std::byte* const base = layer_.memory.workspace.local;
  const std::int64_t slice = layer_.config.max_tokens * sum_bytes_;
  const auto between = [&](bool come) {
    MoveNodeRowsParams params = rows_of(routing, come);
    params.packs = come;
    params.from = base + layout.sums;
    params.from_node_bytes = slice;
    params.to = base + layout.partial_sums;
    params.to_node_bytes = slice;
    params.row_bytes = sum_bytes_;
    return params;
  };
  move(between(true), pack_blocks(), stream_of(call), call.operation);
  const MoveNodeRowsParams unpack = between(false);
  return {.rows = returned_rows(routing.wait_node_rows()),
          .parts = {{.from_bytes = layout.partial_sums,
                     .from_node_bytes = slice,
                     .to_bytes = layout.sums,
                     .to_node_bytes = slice,
                     .row_bytes = sum_bytes_}},
          .unpack = [this, unpack, sms, operation = call.operation](cudaStream_t stream) {
            move(unpack, sms, stream, operation);
          }};
}

int ExpertNodes::path_sms(int num_sms) { return std::clamp(num_sms / 4, 1, 8); }

int ExpertNodes::kernel_sms(int num_sms) { return std::max(1, num_sms - path_sms(num_sms)); }

std::byte* ExpertNodes::own_rows() const {
  return layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_rows +
         own_slice() * token_bytes_;
}

std::byte* ExpertNodes::own_scales() const {
  return layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_scales +
         own_slice() * scale_bytes_;
}

/// The slots that say that whole parts of a node have arrived. With phases one slot of the layer
/// per rank says that, and also that all chunks have arrived.
const std::uint64_t* ExpertNodes::whole_slots(ExpertSignal signal) const {
  if (!by_phases_) return pad_.local;
  return layer_.memory.signals.local +
         static_cast<std::int64_t>(signal) * layer_.config.world_size + local_rank();
}

ChunkSlots ExpertNodes::chunk_slots(ExpertSignal signal) const {
  constexpr std::int32_t all_tokens = 31;
  if (by_phases_) return {whole_slots(signal), layer_.config.local_world_size, all_tokens};
  return {pad_.local + layer_.config.num_nodes(), program_.num_chunks, program_.chunk_shift};
}

ListPutsParams ExpertNodes::list(const ExpertCall& call, const GpuExpertRouting& routing,
                                 FaultKind kind) const {
  ListPutsParams params = program_;
  params.m = params_.arrive(call, kind);
  params.shape = params_.shape(routing);
  params.begins = -1;
  params.filter = NodeFilter::none;
  return params;
}

/// This rank's slice of a part of the workspace, which goes to the same slice of other ranks.
NodePart ExpertNodes::own_slice_of(std::int64_t part, std::int64_t row_bytes,
                                   std::int64_t rows) const {
  const std::int64_t slice = part + own_slice() * row_bytes;
  return {slice, 0, slice, row_bytes, rows * row_bytes};
}

void ExpertNodes::copy(std::byte* to, const ConstTensorView& from, std::int64_t row_bytes,
                       const ExpertCall& call) const {
  const std::int64_t bytes = from.shape[0] * row_bytes;
  if (bytes == 0 || from.data == nullptr || from.data == to) return;
  layer_.gpu->check(
      cudaMemcpyAsync(to, from.data, bytes, cudaMemcpyDeviceToDevice, stream_of(call)),
      "copying to the workspace", call.operation);
}

/// The ids of this rank's tokens as other nodes read them.
std::int32_t* ExpertNodes::own_ids() const {
  return reinterpret_cast<std::int32_t*>(layer_.memory.workspace.local +
                                         layer_.memory.workspace_layout.forward_ids) +
         own_slice() * layer_.config.topk;
}

/// Sends max_tokens ids. Those after the last token say that there is none.
void ExpertNodes::add_ids(const ExpertDispatchInput& input, ListPutsParams& params) const {
  const std::int64_t row_bytes = std::int64_t{layer_.config.topk} * 4;
  const std::int64_t part = layer_.memory.workspace_layout.forward_ids;
  params.given_ids = input.ids.data;
  params.wide_ids = input.ids.dtype == DType::int64;
  params.dropped_id =
      layer_.plans_after_ids() ? layer_.options.dropped(layer_.experts) : layer_.dropped_id();
  params.made_ids = own_ids();
  params.whole[params.num_whole++] = own_slice_of(part, row_bytes, layer_.config.max_tokens);
}

void ExpertNodes::add_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                              ListPutsParams& params) const {
  if (!is_given(input.weights)) return;
  const std::int64_t row_bytes = layer_.config.topk * dtype_bytes(layer_.config.weight_dtype);
  const std::int64_t part = layer_.memory.workspace_layout.forward_weights;
  copy(layer_.memory.workspace.local + part + own_slice() * row_bytes, input.weights, row_bytes,
       call);
  params.whole[params.num_whole++] = own_slice_of(part, row_bytes, input.weights.shape[0]);
}

/// Offset of the rows to send from the workspace. They stay in the caller's tensor if the network
/// path can read it; else they are copied to the workspace.
std::int64_t ExpertNodes::row_offset(const ExpertCall& call, const ConstTensorView& from,
                                     std::byte* in_workspace, std::int64_t row_bytes) const {
  const std::int64_t workspace = address_of(layer_.memory.workspace.local);
  if (layer_.options.payload.is_quantized()) return address_of(in_workspace) - workspace;
  if (path_.maps_peers() && from.data != nullptr) return address_of(from.data) - workspace;
  copy(in_workspace, from, row_bytes, call);
  return address_of(in_workspace) - workspace;
}

void ExpertNodes::add_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                           const GpuExpertRouting& routing, ListPutsParams& params) const {
  const ExpertWorkspaceLayout& layout = layer_.memory.workspace_layout;
  params.filter = NodeFilter::tokens;
  params.ids = routing.part(routing.tables().ids) + own_slice() * layer_.config.topk;
  const std::int64_t rows = layer_.config.max_tokens;
  params.parts[params.num_parts] = own_slice_of(layout.forward_rows, token_bytes_, rows);
  params.parts[params.num_parts++].from = row_offset(call, input.tokens, own_rows(), token_bytes_);
  if (scale_bytes_ == 0) return;
  params.parts[params.num_parts] = own_slice_of(layout.forward_scales, scale_bytes_, rows);
  params.parts[params.num_parts++].from =
      row_offset(call, input.scales, own_scales(), scale_bytes_);
}

void ExpertNodes::add_partial_sums_to(const GpuExpertRouting& routing,
                                      ListPutsParams& params) const {
  const ExpertWorkspaceLayout& layout = layer_.memory.workspace_layout;
  const std::int64_t slice_bytes = layer_.config.max_tokens * sum_bytes_;
  params.filter = NodeFilter::partial_sums;
  params.ids = routing.part(routing.tables().ids);
  params.parts[params.num_parts++] = {layout.sums, slice_bytes,
                                      layout.partial_sums + own_node_ * slice_bytes, sum_bytes_,
                                      slice_bytes};
}

void ExpertNodes::start(const ListPutsParams& params, const ExpertCall& call, int num_sms,
                        std::function<void(cudaStream_t)> unpack) {
  const cudaStream_t stream = stream_of(call);
  layer_.gpu->check(launch_list_puts(params, stream), "launching a kernel", call.operation);
  path_.start({.operation = call.operation,
               .kind = params.m.arrive.kind,
               .arrival = params.begins >= 0 ? PathArrival::first : PathArrival::none,
               .tables = path_tables(params),
               .state = program_.state,
               .phases = std::span(&phase_, 1),
               .unpack = std::move(unpack),
               .window = &layer_.memory.workspace,
               .slots = by_phases_ ? &layer_.memory.signals : &pad_,
               .first_slot = 0,
               .arrivals = &layer_.memory.signals,
               .fingerprint = params.m.arrive.fingerprint,
               .epoch = call.epoch,
               .num_sms = num_sms,
               .stream = stream});
}

/// A phase of whole slices, whose size all ranks know.
ExpertNodes::Phase ExpertNodes::whole(std::span<const NodePart> from) const {
  Phase phase{.rows = whole_slices(layer_.config.num_nodes(), own_node_, layer_.config.max_tokens),
              .parts = {},
              .unpack = {}};
  for (const NodePart& part : from) {
    const std::int64_t slice_bytes = layer_.config.max_tokens * part.row_bytes;
    phase.parts.push_back({part.from, part.from_node_bytes, part.to - own_node_ * slice_bytes,
                           slice_bytes, part.row_bytes});
  }
  return phase;
}

void ExpertNodes::start_phase(const ListPutsParams& params, const Phase& phase, ExpertSignal signal,
                              const ExpertCall& call, int num_sms) {
  const std::int64_t first_slot = static_cast<std::int64_t>(signal) * layer_.config.world_size;
  phase_ = workspace_phase(layer_.transport.topology(), layer_.config.rank, phase.parts, phase.rows,
                           static_cast<std::int32_t>(first_slot), params.begins >= 0);
  ListPutsParams listed = params;
  listed.filter = NodeFilter::none;
  listed.num_whole = 0;
  start(listed, call, num_sms, phase.unpack);
}

WaitNodesParams ExpertNodes::wait_params(const ListPutsParams& params) const {
  WaitNodesParams wait{};
  wait.m = params.m;
  wait.shape = params.shape;
  wait.begins = params.begins;
  wait.node_stride = by_phases_ ? layer_.config.local_world_size : 1;
  return wait;
}

void ExpertNodes::launch(const WaitNodesParams& params, const ExpertCall& call) const {
  layer_.gpu->check(launch_wait_nodes(params, stream_of(call)), "launching a kernel",
                    call.operation);
}

void ExpertNodes::begin_dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                                 const GpuExpertRouting& routing, bool counts, int num_sms) {
  ListPutsParams params = list(call, routing, FaultKind::moe_dispatch);
  params.begins = 0;
  const bool plans = counts && layer_.plans_after_ids();  // the ids are those of experts
  if (plans) params.shape = params_.experts_shape(routing.num_tokens());
  if (counts) add_ids(input, params);
  add_weights(call, input, params);
  if (by_phases_) {
    start_phase(params, whole(std::span(params.whole, params.whole + params.num_whole)),
                ExpertSignal::posted, call, path_sms(num_sms));
    path_.join(stream_of(call));
  } else {
    if (!plans) add_rows(call, input, routing, params);
    start(params, call, path_sms(num_sms));
  }
  WaitNodesParams wait = wait_params(params);
  if (params.num_whole > 0) wait.slots = whole_slots(ExpertSignal::posted);
  launch(wait, call);
  // Slots take the place of the ids that it sends.
  if (plans && !by_phases_) path_.join(stream_of(call));
}

void ExpertNodes::send_planned(const ExpertCall& call, const ExpertDispatchInput& input,
                               const GpuExpertRouting& routing, int num_sms) {
  if (by_phases_) return;  // start_rows does it
  ListPutsParams params = list(call, routing, FaultKind::moe_dispatch);
  params.is_open = true;
  add_rows(call, input, routing, params);
  params.ids = own_ids();  // the route has yet to fill the table
  start(params, call, path_sms(num_sms));
}

void ExpertNodes::note_runs(const ExpertCall& call, GpuExpertRouting& made) const {
  const RoutingTables& tables = made.tables();
  layer_.gpu->check(launch_node_runs(params_.shape(made), made.part(tables.ids),
                                     made.part(tables.send_reqs), stream_of(call)),
                    "launching a kernel", call.operation);
}

void ExpertNodes::start_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                             const GpuExpertRouting& routing, int num_sms, RowsParams& rows) {
  rows.tokens = layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_rows;
  rows.scales = scale_bytes_ == 0
                    ? nullptr
                    : layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_scales;
  rows.own_tokens = rows.tokens;
  rows.own_scales = rows.scales;
  rows.forwarded = chunk_slots(ExpertSignal::forwarded);
  const auto at_slice = [&](const ConstTensorView& own, std::int64_t bytes) {
    // An address before the tensor. Only this rank's slice is read, and that is the tensor.
    const auto begin = address_of(own.data) - own_slice() * bytes;
    return reinterpret_cast<const std::byte*>(begin);  // NOLINT(performance-no-int-to-ptr)
  };
  const bool is_copied = layer_.options.payload.is_quantized() || !path_.maps_peers();
  if (!is_copied && input.tokens.data != nullptr)
    rows.own_tokens = at_slice(input.tokens, token_bytes_);
  if (!is_copied && scale_bytes_ > 0 && input.scales.data != nullptr)
    rows.own_scales = at_slice(input.scales, scale_bytes_);
  if (!by_phases_) return;
  ListPutsParams params = list(call, routing, FaultKind::moe_dispatch);
  add_rows(call, input, routing, params);
  const int sms = path_sms(num_sms);
  // Packed rows must fit into the arrays of sums.
  const bool packs = are_known(call) && token_bytes_ + scale_bytes_ <= sum_bytes_;
  start_phase(params,
              packs ? pack_tokens(call, routing, sms)
                    : whole(std::span(params.parts, params.parts + params.num_parts)),
              ExpertSignal::forwarded, call, sms);
}

void ExpertNodes::finish_rows(const ExpertCall& call) { path_.join(stream_of(call)); }

void ExpertNodes::begin_combine(const ExpertCall& call, const GpuExpertRouting& routing,
                                int num_sms) {
  ListPutsParams params = list(call, routing, FaultKind::moe_combine);
  params.begins = 1;
  WaitNodesParams wait = wait_params(params);
  if (by_phases_) {  // no path runs with other kernels before the host queues it
    start_phase(params, whole({}), ExpertSignal::shared, call, path_sms(num_sms));
    path_.join(stream_of(call));
    wait.counts = true;
  } else {
    add_partial_sums_to(routing, params);
    start(params, call, path_sms(num_sms));
    wait.of_node = true;
  }
  launch(wait, call);
}

void ExpertNodes::finish_piece(const ExpertCall& call, const SumPiece& piece) {
  if (by_phases_ || piece.count == 0) return;
  layer_.gpu->check(launch_raise_ready(params_.arrive(call, FaultKind::moe_combine),
                                       ready_ + piece.ready, stream_of(call)),
                    "launching a kernel", call.operation);
}

void ExpertNodes::finish_pieces(const ExpertCall& call, const GpuExpertRouting& routing,
                                int num_sms) {
  if (!by_phases_) return;
  ListPutsParams params = list(call, routing, FaultKind::moe_combine);
  add_partial_sums_to(routing, params);
  const int sms = path_sms(num_sms);
  start_phase(params,
              are_known(call) ? pack_sums(call, routing, sms) : whole(std::span(params.parts, 1)),
              ExpertSignal::shared, call, sms);
}

void ExpertNodes::add_partial_sums(const ExpertCall& call, const ExpertCombineInput& input,
                                   const GpuExpertRouting& routing, int num_sms) {
  ListPutsParams params = list(call, routing, FaultKind::moe_combine);
  if (by_phases_) {
    path_.join(stream_of(call));
  } else {
    params.begins = 1;
    WaitNodesParams wait = wait_params(params);
    wait.counts = true;
    launch(wait, call);
  }
  AddPartialSumsParams add{};
  add.m = params.m;
  add.shape = params.shape;
  add.arrived = chunk_slots(ExpertSignal::shared);
  add.row_bytes = sum_bytes_;
  add.ids = routing.part(routing.tables().ids) + own_slice() * layer_.config.topk;
  add.partial_sums = layer_.memory.workspace.local + layer_.memory.workspace_layout.partial_sums;
  add.own_sums = sums() + own_slice() * sum_bytes_;
  for (std::size_t i = 0; i < input.biases.size(); ++i) add.biases[i] = input.biases[i].data;
  add.output = input.output.data;
  const bool wide = common_word({sum_bytes_, address_of(add.output), address_of(add.biases[0]),
                                 address_of(add.biases[1])}) == 16;
  // Blocks that wait must leave SMs for the network path, for other ranks on the device, and for a
  // combine of another layer on another stream.
  layer_.gpu->check(launch_add_partial_sums(add, layer_.config.token_dtype, wide,
                                            kernel_sms(num_sms), stream_of(call)),
                    "launching a kernel", call.operation);
  if (!by_phases_) path_.join(stream_of(call));
}

}  // namespace waybill::cuda
