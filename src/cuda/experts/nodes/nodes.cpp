#include "nodes.h"

#include <algorithm>
#include <span>
#include <utility>

#include "../../rank/gpu_rank.h"
#include "../launch.h"
#include "core/memory_layout.h"
#include "params.h"
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

ChunkProgram::ChunkProgram(const GpuExpertLayer& layer, std::int64_t max_row_bytes)
    : layer_(layer),
      chunk_shift_(chunk_shift(max_row_bytes, layer.config.max_tokens)),
      num_chunks_(static_cast<std::int32_t>(num_chunks(layer.config.max_tokens, chunk_shift_))) {
  if (layer_.config.max_tokens >= tokens_in_pieces) {
    ready_pieces_ = pieces_of_node;
    const std::int64_t each = (layer_.config.max_tokens + pieces_of_node - 1) / pieces_of_node;
    const std::int64_t chunk = std::int64_t{1} << chunk_shift_;
    piece_tokens_ = (each + chunk - 1) / chunk * chunk;
  }
  const std::int64_t steps = others() * (1 + num_chunks_);
  const std::int64_t row_puts = (std::int64_t{num_chunks_} << chunk_shift_) * max_node_parts;
  const std::int64_t puts = others() * (max_whole_puts(layer_.config) + row_puts);
  waybill::detail::MemoryLayout parts;
  const std::int64_t put_table = parts.take(puts * std::int64_t{sizeof(NetworkPut)});
  const std::int64_t step_table = parts.take(steps * std::int64_t{sizeof(NetworkStep)});
  const std::int64_t waits = parts.take(steps * std::int64_t{sizeof(BatchSlot)});
  const std::int64_t signals = parts.take(steps * std::int64_t{sizeof(BatchSlot)});
  const std::int64_t done = parts.take(steps * std::int64_t{sizeof(unsigned)});
  const std::int64_t state = parts.take(sizeof(PathState));
  const std::int64_t ready =
      parts.take((2 + others() * ready_pieces_) * std::int64_t{sizeof(std::uint64_t)});
  tables_ = device_memory(parts.total(), layer_.gpu->stream());
  auto* const base = static_cast<std::byte*>(tables_.get());
  program_ = {
      reinterpret_cast<PathState*>(base + state), reinterpret_cast<NetworkStep*>(base + step_table),
      reinterpret_cast<NetworkPut*>(base + put_table), reinterpret_cast<BatchSlot*>(base + waits),
      reinterpret_cast<BatchSlot*>(base + signals)};
  done_ = reinterpret_cast<unsigned*>(base + done);
  ready_ = reinterpret_cast<std::uint64_t*>(base + ready);
  pad_ = layer_.transport.allocate_signals(
      std::int64_t{layer_.config.num_nodes()} * (1 + num_chunks_), "expert chunks");
}

ChunkProgram::~ChunkProgram() {
  layer_.transport.defer_release(std::move(pad_.memory));
  layer_.transport.defer_release({tables_});
}

void ChunkProgram::add_to(ListPutsParams& params) const {
  params.chunk_shift = chunk_shift_;
  params.num_chunks = num_chunks_;
  params.whole_slot = 0;
  params.chunk_slot = layer_.config.num_nodes();
  params.ready_pieces = ready_pieces_;
  params.piece_tokens = static_cast<std::int32_t>(piece_tokens_);
  params.out = program_;
}

PathTables ChunkProgram::tables(const ListPutsParams& params) const {
  const std::int64_t whole_steps = params.num_whole > 0 ? others() : 0;
  const std::int64_t row_steps = params.filter != NodeFilter::none ? others() * num_chunks_ : 0;
  return {.num_puts = nullptr,
          .steps = program_.steps,
          .puts = program_.puts,
          .waits = program_.waits,
          .signals = program_.signals,
          .done = done_,
          .ready = ready_,
          .num_steps = static_cast<std::int32_t>(whole_steps + row_steps),
          .first_steps = static_cast<std::int32_t>(whole_steps),
          .steps_of_peer = num_chunks_,
          .one_block_of_peer = false};
}

std::vector<SumPiece> ChunkProgram::pieces() const {
  std::vector<SumPiece> pieces;
  const std::int64_t tokens = layer_.config.max_tokens;
  const std::int64_t nodes = layer_.config.num_nodes();
  const std::int64_t own = layer_.config.rank / layer_.config.local_world_size;
  if (ready_pieces_ == 0) {
    pieces.push_back({(own + 1) * tokens, (nodes - own - 1) * tokens, 0});
    pieces.push_back({0, own * tokens, 1});
    return pieces;
  }
  for (std::int32_t k = 0; k < others(); ++k) {
    const std::int64_t node = (own + 1 + k) % nodes;
    for (std::int32_t i = 0; i < ready_pieces_; ++i) {
      const std::int64_t first = std::min(i * piece_tokens_, tokens);
      const std::int64_t end = std::min(first + piece_tokens_, tokens);
      pieces.push_back({node * tokens + first, end - first, k * ready_pieces_ + i});
    }
  }
  return pieces;
}

NodeSlices::NodeSlices(const GpuExpertLayer& layer, const ExpertParams& params)
    : layer_(layer),
      params_(params),
      sum_bytes_(layer.config.hidden * dtype_bytes(layer.config.token_dtype)),
      token_bytes_(payload_row_bytes(layer.config, layer.options)),
      scale_bytes_(scale_row_bytes(layer.config, layer.options)) {}

bool NodeSlices::fit() const { return token_bytes_ + scale_bytes_ <= sum_bytes_; }

void NodeSlices::count(const ExpertCall& call, GpuExpertRouting& made) const {
  made.expect_node_rows();
  NodeRowsParams params{};
  params.shape = params_.shape(made);
  params.ids = reinterpret_cast<const std::int32_t*>(layer_.memory.workspace.local +
                                                     layer_.memory.workspace_layout.forward_ids);
  params.tokens = made.part(made.fixed().node_tokens);
  params.counts = made.part(made.fixed().node_counts);
  params.host = made.node_counts();
  params.ticket = made.ticket();
  layer_.gpu->check(launch_node_rows(params, stream_of(call)), "launching a kernel",
                    call.operation);
}

MoveNodeRowsParams NodeSlices::rows_of(const GpuExpertRouting& routing, Direction direction) const {
  const std::int64_t nodes = direction == Direction::to_nodes ? 0 : layer_.config.num_nodes();
  MoveNodeRowsParams params{};
  params.shape = params_.shape(routing);
  params.tokens = routing.part(routing.fixed().node_tokens) + nodes * layer_.config.max_tokens;
  params.counts = routing.part(routing.fixed().node_counts) + nodes;
  return params;
}

/// No other kernel runs meanwhile.
int NodeSlices::pack_blocks() const {
  return std::max(1, 2 * layer_.gpu->num_sms() / layer_.share);
}

void NodeSlices::move(const MoveNodeRowsParams& params, int blocks, cudaStream_t stream,
                      const char* operation) const {
  const int word = common_word({address_of(params.from), params.from_node_bytes,
                                address_of(params.to), params.to_node_bytes, params.row_bytes});
  layer_.gpu->check(launch_move_node_rows(params, word, blocks, stream), "launching a kernel",
                    operation);
}

/// Packs from this rank's slice into the array of sums, and unpacks from the array of partial sums
/// to where rows are forwarded.
NodeSlices::Phase NodeSlices::pack_tokens(const ExpertCall& call, const GpuExpertRouting& routing,
                                          int path_sms) const {
  const ExpertWorkspaceLayout& layout = layer_.memory.workspace_layout;
  std::byte* const base = layer_.memory.workspace.local;
  const std::int64_t slice = layer_.config.max_tokens * sum_bytes_;
  const std::int64_t own_slice =
      std::int64_t{layer_.config.rank / layer_.config.local_world_size} * layer_.config.max_tokens;
  const int blocks = pack_blocks();
  Phase phase{.rows = routing.wait_node_rows(), .parts = {}, .unpack = {}};
  std::vector<MoveNodeRowsParams> unpacks;
  const auto add = [&](std::int64_t part, std::int64_t row_bytes, std::int64_t staged) {
    MoveNodeRowsParams pack = rows_of(routing, Direction::to_nodes);
    pack.packs = true;
    pack.from = base + part + own_slice * row_bytes;
    pack.to = base + layout.sums + staged;
    pack.to_node_bytes = slice;
    pack.row_bytes = row_bytes;
    move(pack, blocks, stream_of(call), call.operation);
    MoveNodeRowsParams unpack = rows_of(routing, Direction::from_nodes);
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
  phase.unpack = [this, unpacks, path_sms, operation = call.operation](cudaStream_t stream) {
    for (const MoveNodeRowsParams& unpack : unpacks) move(unpack, path_sms, stream, operation);
  };
  return phase;
}

/// Packs the sums into the array of partial sums, where nothing has arrived yet, and sends them
/// from there to the receivers' arrays of sums. When they have been sent, what has arrived is
/// unpacked into the array of partial sums.
NodeSlices::Phase NodeSlices::pack_sums(const ExpertCall& call, const GpuExpertRouting& routing,
                                        int path_sms) const {
  const ExpertWorkspaceLayout& layout = layer_.memory.workspace_layout;
  std::byte* const base = layer_.memory.workspace.local;
  const std::int64_t slice = layer_.config.max_tokens * sum_bytes_;
  const auto between = [&](Direction direction, std::int64_t from, std::int64_t to) {
    MoveNodeRowsParams params = rows_of(routing, direction);
    params.packs = direction == Direction::from_nodes;
    params.from = base + from;
    params.from_node_bytes = slice;
    params.to = base + to;
    params.to_node_bytes = slice;
    params.row_bytes = sum_bytes_;
    return params;
  };
  move(between(Direction::from_nodes, layout.sums, layout.partial_sums), pack_blocks(),
       stream_of(call), call.operation);
  const MoveNodeRowsParams unpack = between(Direction::to_nodes, layout.sums, layout.partial_sums);
  return {.rows = returned_rows(routing.wait_node_rows()),
          .parts = {{.from_bytes = layout.partial_sums,
                     .from_node_bytes = slice,
                     .to_bytes = layout.sums,
                     .to_node_bytes = slice,
                     .row_bytes = sum_bytes_}},
          .unpack = [this, unpack, path_sms, operation = call.operation](cudaStream_t stream) {
            move(unpack, path_sms, stream, operation);
          }};
}

namespace {

/// The largest row of a token that is sent.
std::int64_t max_row_bytes(const EPConfig& config, const EPDispatchOptions& options) {
  return std::max(payload_row_bytes(config, options),
                  config.hidden * dtype_bytes(config.token_dtype));
}

}  // namespace

ExpertNodes::ExpertNodes(const GpuExpertLayer& layer, NetworkPath& path, const ExpertParams& params)
    : layer_(layer),
      path_(path),
      params_(params),
      by_phases_(path.needs_phases()),
      own_node_(layer.config.rank / layer.config.local_world_size),
      program_(layer, max_row_bytes(layer.config, layer.options)) {
  cuda_check(prepare_nodes(layer_.config.token_dtype), "loading kernels");
  if (by_phases_) {
    slices_ = std::make_unique<NodeSlices>(layer_, params_);
  }
}

int ExpertNodes::path_sms(int num_sms) { return std::clamp(num_sms / 4, 1, 8); }

int ExpertNodes::kernel_sms(int num_sms) { return std::max(1, num_sms - path_sms(num_sms)); }

std::byte* ExpertNodes::own_rows() const {
  return layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_rows +
         own_slice() * payload_row_bytes(layer_.config, layer_.options);
}

std::byte* ExpertNodes::own_scales() const {
  return layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_scales +
         own_slice() * scale_row_bytes(layer_.config, layer_.options);
}

/// The slots that say that whole parts of a node have arrived. With phases one slot of the layer
/// per rank says that, and also that all chunks have arrived.
const std::uint64_t* ExpertNodes::whole_slots(ExpertSignal signal) const {
  if (!by_phases_) return program_.whole_slots();
  return layer_.memory.signals.local +
         static_cast<std::int64_t>(signal) * layer_.config.world_size + local_rank();
}

ChunkSlots ExpertNodes::chunk_slots(ExpertSignal signal) const {
  constexpr std::int32_t all_tokens = 31;
  if (by_phases_) return {whole_slots(signal), layer_.config.local_world_size, all_tokens};
  return program_.chunk_slots();
}

ListPutsParams ExpertNodes::list(const ExpertCall& call, const GpuExpertRouting& routing,
                                 FaultKind kind) const {
  ListPutsParams params{};
  params.m = params_.arrive(call, kind);
  params.shape = params_.shape(routing);
  params.begins = -1;
  params.filter = NodeFilter::none;
  program_.add_to(params);
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

/// Sends max_tokens ids. Those after the last token say that there is none.
void ExpertNodes::add_ids(const ExpertDispatchInput& input, ListPutsParams& params) const {
  const std::int64_t row_bytes = std::int64_t{layer_.config.topk} * 4;
  const std::int64_t part = layer_.memory.workspace_layout.forward_ids;
  params.given_ids = input.ids.data;
  params.wide_ids = input.ids.dtype == DType::int64;
  params.dropped_id = layer_.options.dropped(layer_.config);
  params.made_ids = reinterpret_cast<std::int32_t*>(layer_.memory.workspace.local + part +
                                                    own_slice() * row_bytes);
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
  if (layer_.options.payload == EPPayload::quantized) return address_of(in_workspace) - workspace;
  if (path_.maps_peers() && from.data != nullptr) return address_of(from.data) - workspace;
  copy(in_workspace, from, row_bytes, call);
  return address_of(in_workspace) - workspace;
}

void ExpertNodes::add_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                           const GpuExpertRouting& routing, ListPutsParams& params) const {
  const ExpertWorkspaceLayout& layout = layer_.memory.workspace_layout;
  const std::int64_t row_bytes = payload_row_bytes(layer_.config, layer_.options);
  const std::int64_t scale_bytes = scale_row_bytes(layer_.config, layer_.options);
  params.filter = NodeFilter::tokens;
  params.ids = routing.part(routing.fixed().ids) + own_slice() * layer_.config.topk;
  const std::int64_t rows = layer_.config.max_tokens;
  params.parts[params.num_parts] = own_slice_of(layout.forward_rows, row_bytes, rows);
  params.parts[params.num_parts++].from = row_offset(call, input.tokens, own_rows(), row_bytes);
  if (scale_bytes == 0) return;
  params.parts[params.num_parts] = own_slice_of(layout.forward_scales, scale_bytes, rows);
  params.parts[params.num_parts++].from = row_offset(call, input.scales, own_scales(), scale_bytes);
}

void ExpertNodes::add_partial_sums_to(const GpuExpertRouting& routing,
                                      ListPutsParams& params) const {
  const ExpertWorkspaceLayout& layout = layer_.memory.workspace_layout;
  const std::int64_t row_bytes = layer_.config.hidden * dtype_bytes(layer_.config.token_dtype);
  const std::int64_t slice_bytes = layer_.config.max_tokens * row_bytes;
  params.filter = NodeFilter::partial_sums;
  params.ids = routing.part(routing.fixed().ids);
  params.parts[params.num_parts++] = {layout.sums, slice_bytes,
                                      layout.partial_sums + own_node_ * slice_bytes, row_bytes,
                                      slice_bytes};
}

void ExpertNodes::start(const ListPutsParams& params, const ExpertCall& call, int num_sms,
                        std::function<void(cudaStream_t)> unpack) {
  const cudaStream_t stream = stream_of(call);
  layer_.gpu->check(launch_list_puts(params, stream), "launching a kernel", call.operation);
  path_.start({.operation = call.operation,
               .kind = params.m.arrive.kind,
               .arrival = params.begins >= 0 ? PathArrival::first : PathArrival::none,
               .tables = program_.tables(params),
               .state = program_.state(),
               .phases = std::span(&phase_, 1),
               .unpack = std::move(unpack),
               .window = &layer_.memory.workspace,
               .slots = by_phases_ ? &layer_.memory.signals : &program_.pad(),
               .first_slot = 0,
               .arrivals = &layer_.memory.signals,
               .fingerprint = params.m.arrive.fingerprint,
               .epoch = call.epoch,
               .num_sms = num_sms,
               .stream = stream});
}

/// A phase of whole slices, whose size all ranks know.
NodeSlices::Phase ExpertNodes::whole(std::span<const NodePart> from) const {
  NodeSlices::Phase phase{
      .rows = whole_slices(layer_.config.num_nodes(), own_node_, layer_.config.max_tokens),
      .parts = {},
      .unpack = {}};
  for (const NodePart& part : from) {
    const std::int64_t slice_bytes = layer_.config.max_tokens * part.row_bytes;
    phase.parts.push_back({part.from, part.from_node_bytes, part.to - own_node_ * slice_bytes,
                           slice_bytes, part.row_bytes});
  }
  return phase;
}

void ExpertNodes::start_phase(const ListPutsParams& params, const NodeSlices::Phase& phase,
                              ExpertSignal signal, const ExpertCall& call, int num_sms) {
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
  if (counts) add_ids(input, params);
  add_weights(call, input, params);
  if (by_phases_) {
    start_phase(params, whole(std::span(params.whole, params.whole + params.num_whole)),
                ExpertSignal::posted, call, path_sms(num_sms));
    path_.join(stream_of(call));
  } else {
    add_rows(call, input, routing, params);
    start(params, call, path_sms(num_sms));
  }
  WaitNodesParams wait = wait_params(params);
  if (params.num_whole > 0) wait.slots = whole_slots(ExpertSignal::posted);
  launch(wait, call);
}

void ExpertNodes::count_rows(const ExpertCall& call, GpuExpertRouting& made) const {
  if (by_phases_ && NodeSlices::are_known(call)) slices_->count(call, made);
}

void ExpertNodes::note_runs(const ExpertCall& call, GpuExpertRouting& made) const {
  NodeRunsParams params{};
  params.shape = params_.shape(made);
  params.ids = made.part(made.fixed().ids);
  params.runs = made.part(made.fixed().send_reqs);
  layer_.gpu->check(launch_node_runs(params, stream_of(call)), "launching a kernel",
                    call.operation);
}

void ExpertNodes::start_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                             const GpuExpertRouting& routing, int num_sms, RowsParams& rows) {
  const std::int64_t row_bytes = payload_row_bytes(layer_.config, layer_.options);
  const std::int64_t scale_bytes = scale_row_bytes(layer_.config, layer_.options);
  rows.tokens = layer_.memory.workspace.local + layer_.memory.workspace_layout.forward_rows;
  rows.scales = scale_bytes == 0
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
  const bool is_copied = layer_.options.payload == EPPayload::quantized || !path_.maps_peers();
  if (!is_copied && input.tokens.data != nullptr)
    rows.own_tokens = at_slice(input.tokens, row_bytes);
  if (!is_copied && scale_bytes > 0 && input.scales.data != nullptr)
    rows.own_scales = at_slice(input.scales, scale_bytes);
  if (!by_phases_) return;
  ListPutsParams params = list(call, routing, FaultKind::moe_dispatch);
  add_rows(call, input, routing, params);
  const int sms = path_sms(num_sms);
  const bool packs = NodeSlices::are_known(call) && slices_->fit();
  start_phase(params,
              packs ? slices_->pack_tokens(call, routing, sms)
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
                                       program_.ready(piece), stream_of(call)),
                    "launching a kernel", call.operation);
}

void ExpertNodes::finish_pieces(const ExpertCall& call, const GpuExpertRouting& routing,
                                int num_sms) {
  if (!by_phases_) return;
  ListPutsParams params = list(call, routing, FaultKind::moe_combine);
  add_partial_sums_to(routing, params);
  const int sms = path_sms(num_sms);
  start_phase(params,
              NodeSlices::are_known(call) ? slices_->pack_sums(call, routing, sms)
                                          : whole(std::span(params.parts, 1)),
              ExpertSignal::shared, call, sms);
}

void ExpertNodes::add_partial_sums(const ExpertCall& call, const ExpertCombineInput& input,
                                   const GpuExpertRouting& routing, int num_sms) {
  const std::int64_t row_bytes = layer_.config.hidden * dtype_bytes(layer_.config.token_dtype);
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
  add.row_bytes = row_bytes;
  add.ids = routing.part(routing.fixed().ids) + own_slice() * layer_.config.topk;
  add.partial_sums = layer_.memory.workspace.local + layer_.memory.workspace_layout.partial_sums;
  add.own_sums = sums() + own_slice() * row_bytes;
  for (std::size_t i = 0; i < input.biases.size(); ++i) add.biases[i] = input.biases[i].data;
  add.output = input.output.data;
  const bool wide = common_word({row_bytes, address_of(add.output), address_of(add.biases[0]),
                                 address_of(add.biases[1])}) == 16;
  // Blocks that wait must leave SMs for the network path and for other ranks on the device.
  const int blocks = layer_.share == 1 ? layer_.gpu->num_sms() : kernel_sms(num_sms);
  layer_.gpu->check(
      launch_add_partial_sums(add, layer_.config.token_dtype, wide, blocks, stream_of(call)),
      "launching a kernel", call.operation);
  if (!by_phases_) path_.join(stream_of(call));
}

}  // namespace waybill::cuda
