#include "host_expert_dispatch.h"

#include <algorithm>
#include <cstring>

#include "core/to_size.h"
#include "shared_rows.h"
#include "waybill/core/error.h"
#include "waybill/moe/quantize.h"

namespace waybill::detail {
namespace {

std::vector<std::int64_t> read_positions(const ConstTensorView& view) {
  std::vector<std::int64_t> positions;
  if (!is_given(view)) return positions;
  const std::int64_t count = view.shape[0] * view.shape[1];
  for (std::int64_t i = 0; i < count; ++i) {
    positions.push_back(view.dtype == DType::int32
                            ? reinterpret_cast<const std::int32_t*>(view.data)[i]
                            : reinterpret_cast<const std::int64_t*>(view.data)[i]);
  }
  return positions;
}

}  // namespace

ExpertWindow HostExpertDispatch::own_window(const ExpertCall& call) const {
  return {config_, options_, memory_, memory_.dispatch_windows[call.parity].local};
}

void HostExpertDispatch::clear_tags(const ExpertCall& call) {
  const ExpertWindow window = own_window(call);
  for (std::int64_t row = 0; row < memory_.capacity_rows; ++row) window.tag(row).source_rank = -1;
  cleared_window_ = memory_.dispatch_windows[call.parity].local;
}

std::shared_ptr<HostExpertTables> HostExpertDispatch::route(const ExpertCall& call,
                                                            const ExpertDispatchInput& input) {
  const auto routing = std::make_shared<HostExpertRouting>(config_, options_);
  const auto ids = read_expert_ids(config_, options_, input.ids, call.operation);
  routing->positions = read_positions(input.full_scatter_indices);
  if (!routing->positions.empty()) clear_tags(call);
  const auto counts = count_topk_slots(config_, ids);
  for (std::int32_t e = 0; call.max_per_expert > 0 && e < config_.num_experts; ++e) {
    require(counts[e] <= call.max_per_expert, call.operation, ": exp_indices of rank ",
            config_.rank, " hold expert ", e, " more than max_per_expert = ", call.max_per_expert,
            " times");
  }
  tell_counts(call, counts);
  round_.enter(call);
  routing->rows = share_rows(memory_.workspace.memory.front(), call.epoch,
                             [&] { return locate_rows(config_, options_, told_counts(call)); });
  routing->required_rows = static_cast<std::int32_t>(routing->rows->largest_recv_rows);
  routing->dst_rows.assign(slice(config_.num_nodes()) * config_.topk, -1);
  if (config_.is_intra_node()) {
    routing->ids = ids;
  } else {
    routing->ids.assign(routing->dst_rows.size(), -1);
    routing->send_reqs.assign(slice(config_.num_nodes()) * 2, -1);
    std::ranges::copy(ids, routing->ids_of(routing->own_node()).begin());
  }
  place_own(*routing);
  auto tables = std::make_shared<HostExpertTables>(routing, config_.weight_dtype);
  take_weights(input, *tables);
  return tables;
}

/// The others read them here, also those of other nodes: copies for them would be W^2 num_counts
/// integers in all, 8.6 GB of 1024 ranks with an expert each.
void HostExpertDispatch::tell_counts(const ExpertCall& call, std::span<const std::int32_t> counts) {
  const auto size_bytes = static_cast<std::int64_t>(counts.size_bytes());
  round_.post(config_.rank, memory_.workspace_layout.counts[call.parity], counts.data(),
              size_bytes);
}

/// They stay as they are until all ranks have entered the next dispatch, and so left this one.
std::vector<std::span<const std::int32_t>> HostExpertDispatch::told_counts(
    const ExpertCall& call) const {
  std::vector<std::span<const std::int32_t>> counts;
  for (std::int32_t r = 0; r < config_.world_size; ++r) {
    const auto* const part = static_cast<const std::byte*>(memory_.workspace.memory[r].get());
    counts.emplace_back(
        reinterpret_cast<const std::int32_t*>(part + memory_.workspace_layout.counts[call.parity]),
        num_counts(config_));
  }
  return counts;
}

std::shared_ptr<HostExpertTables> HostExpertDispatch::enter(const ExpertCall& call,
                                                            const ExpertDispatchInput& input,
                                                            const HostExpertTables& earlier) {
  auto tables = std::make_shared<HostExpertTables>(earlier.shared_routing(), config_.weight_dtype);
  take_weights(input, *tables);
  round_.enter(call);
  return tables;
}

void HostExpertDispatch::take_weights(const ExpertDispatchInput& input,
                                      HostExpertTables& tables) const {
  if (!is_given(input.weights)) return;
  tables.carry_weights();
  const HostExpertRouting& routing = tables.routing();
  const auto own = routing.ids_of(routing.own_node());
  if (own.empty()) return;
  std::memcpy(tables.weights_of(routing.own_node()), input.weights.data,
              own.size() * dtype_bytes(config_.weight_dtype));
}

void HostExpertDispatch::place(std::int32_t node, HostExpertRouting& routing) const {
  const std::int32_t source = routing.peer(node);
  const auto ids = routing.ids_of(node);
  if (routing.positions.empty()) {
    const auto places = place_topk_slots(config_, options_, *routing.rows, source, ids);
    const auto out = routing.places_of(node);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::int32_t rank = config_.rank_of_expert(ids[i]);
      if (rank / config_.local_world_size == routing.own_node()) out[i] = places[i];
    }
    return;
  }
  std::int64_t first = 0;
  for (std::int32_t r = 0; r < source; ++r) first += routing.rows->num_input_tokens[r];
  const auto positions = std::span(routing.positions).subspan(first * config_.topk, ids.size());
  std::ranges::copy(
      place_by_scatter_indices(config_, *routing.rows, source, ids, positions, "dispatch"),
      routing.places_of(node).begin());
}

void HostExpertDispatch::place_own(HostExpertRouting& routing) const {
  std::int64_t tokens = 0;
  for (const std::int32_t count : routing.rows->num_input_tokens) tokens += count;
  try {
    require(routing.positions.empty() || std::ssize(routing.positions) == tokens * config_.topk,
            "dispatch: full_scatter_indices has ", std::ssize(routing.positions) / config_.topk,
            " tokens, expected ", tokens, ": those of all ranks, one rank after another");
    place(routing.own_node(), routing);
  } catch (const InvalidArgument& error) {  // the others count on this rank's part of the call
    routing.wrong_positions = error.what();
  }
}

void HostExpertDispatch::place_forwarded(std::int32_t node, HostExpertRouting& routing) const {
  const auto ids = routing.ids_of(node);
  const std::int64_t entry = slice(node) * config_.topk;
  const ExpertWorkspaceLayout& workspace = memory_.workspace_layout;
  const auto* const from = round_.read<std::int32_t>(
      workspace.forward_ids + entry * static_cast<std::int64_t>(sizeof(std::int32_t)));
  std::copy_n(from, ids.size(), ids.begin());
  if (routing.wrong_positions.empty()) {  // else there may be none of these tokens
    try {
      place(node, routing);
    } catch (const InvalidArgument& error) {
      routing.wrong_positions = error.what();
    }
  }
  const auto sent = node_send_requests(config_, routing.peer(node), ids);
  const std::int64_t plane = 2 * config_.max_tokens;
  std::copy_n(sent.begin() + routing.own_node() * plane, plane,
              routing.send_reqs.begin() + node * plane);
}

void HostExpertDispatch::prepare_payload(const ExpertDispatchInput& input) {
  const std::int64_t tokens = input.tokens.shape[0];
  payload_ = {.source_rank = config_.rank, .rows = input.tokens.data, .scales = input.scales.data};
  if (options_.payload != EPPayload::quantized) return;
  const std::size_t hidden = config_.hidden;
  const std::size_t scales = num_scales(config_, options_);
  quantized_rows_.resize(tokens * hidden);
  quantized_scales_.resize(tokens * scales);
  for (std::size_t t = 0; t < to_size(tokens); ++t) {
    quantize_row(input.tokens.data + t * hidden * dtype_bytes(input.tokens.dtype),
                 input.tokens.dtype,
                 {reinterpret_cast<std::uint8_t*>(quantized_rows_.data()) + t * hidden, hidden},
                 std::span(quantized_scales_).subspan(t * scales, scales));
  }
  payload_.rows = quantized_rows_.data();
  payload_.scales = reinterpret_cast<const std::byte*>(quantized_scales_.data());
}

void HostExpertDispatch::send_to_node(const ExpertCall& call, std::int32_t node,
                                      const HostExpertTables& tables) {
  const ExpertWorkspaceLayout& workspace = memory_.workspace_layout;
  const ExpertWindow window = own_window(call);
  const HostExpertRouting& routing = tables.routing();
  const std::int32_t peer = routing.peer(node);
  const std::int32_t own = routing.own_node();
  const auto ids = routing.ids_of(own);
  const auto ranges = node_send_requests(config_, config_.rank, ids);
  const std::int32_t* const starts = ranges.data() + slice(node) * 2;
  const std::int32_t* const ends = starts + config_.max_tokens;
  for (std::int64_t slot = 0; slot < config_.max_tokens; ++slot) {
    if (starts[slot] < 0) continue;
    const auto send = [&](std::int64_t part, const std::byte* from, std::int64_t bytes) {
      round_.post(peer, part + (slice(own) + starts[slot]) * bytes, from + starts[slot] * bytes,
                  (ends[slot] - starts[slot]) * bytes);
    };
    send(workspace.forward_rows, payload_.rows, window.row_bytes());
    if (window.scale_bytes() > 0)
      send(workspace.forward_scales, payload_.scales, window.scale_bytes());
  }
  const std::int64_t entry = slice(own) * config_.topk;
  if (!ids.empty()) {
    const auto count = std::ssize(ids);
    const auto id_bytes = static_cast<std::int64_t>(sizeof(ids[0]));
    round_.post(peer, workspace.forward_ids + entry * id_bytes, ids.data(), count * id_bytes);
    if (const std::byte* const weights = tables.weights_of(own); weights != nullptr) {
      const std::int64_t bytes = window.weight_bytes();
      round_.post(peer, workspace.forward_weights + entry * bytes, weights, count * bytes);
    }
  }
  round_.raise(ExpertSignal::forwarded, peer, call);
}

/// Tokens of another node's rank, which are here, to the ranks of this node.
void HostExpertDispatch::take_from_node(const ExpertCall& call, std::int32_t node,
                                        HostExpertTables& tables) {
  const ExpertWorkspaceLayout& workspace = memory_.workspace_layout;
  const ExpertWindow window = own_window(call);
  if (HostExpertRouting* const made = tables.being_made(); made != nullptr) {
    place_forwarded(node, *made);
  }
  if (std::byte* const weights = tables.weights_of(node); weights != nullptr) {
    const std::int64_t entry = slice(node) * config_.topk;
    std::memcpy(weights,
                round_.read<std::byte>(workspace.forward_weights + entry * window.weight_bytes()),
                tables.routing().ids_of(node).size() * window.weight_bytes());
  }
  TokenBlock block;
  block.rows = round_.read<std::byte>(workspace.forward_rows + slice(node) * window.row_bytes());
  block.scales =
      round_.read<std::byte>(workspace.forward_scales + slice(node) * window.scale_bytes());
  deliver_from(node, block, tables, call);
}

void HostExpertDispatch::deliver_from(std::int32_t node, const TokenBlock& payload,
                                      const HostExpertTables& tables,
                                      const ExpertCall& call) const {
  const HostExpertRouting& routing = tables.routing();
  if (!routing.wrong_positions.empty()) return;
  const std::int32_t local = config_.local_world_size;
  std::vector<ExpertWindow> windows;
  for (std::int32_t r = 0; r < local; ++r) {
    const std::size_t rank = routing.own_node() * local + r;
    windows.emplace_back(config_, options_, memory_,
                         memory_.dispatch_windows[call.parity].peers[rank]);
  }
  TokenBlock block = payload;
  block.source_rank = routing.peer(node);
  block.weights = tables.weights_of(node);
  block.ids = routing.ids_of(node);
  block.places = routing.places_of(node);
  deliver(config_, options_, memory_.capacity_rows, windows, block);
}

void HostExpertDispatch::run(const ExpertCall& call, const ExpertDispatchInput& input,
                             HostExpertTables& tables) {
  const HostExpertRouting& routing = tables.routing();
  const bool checks_positions = tables.being_made() != nullptr && !routing.positions.empty();
  if (checks_positions && cleared_window_ != memory_.dispatch_windows[call.parity].local) {
    clear_tags(call);  // the windows have grown since route: on all ranks
    round_.barrier(call);
  }
  prepare_payload(input);
  const std::int32_t nodes = config_.num_nodes();
  const std::int32_t own = routing.own_node();
  for (std::int32_t k = 1; k < nodes; ++k) send_to_node(call, (own + k) % nodes, tables);
  deliver_from(own, payload_, tables, call);
  for (std::int32_t k = 1; k < nodes; ++k) {
    const std::int32_t node = (own + nodes - k) % nodes;
    round_.wait_for(ExpertSignal::forwarded, routing.peer(node), call);
    take_from_node(call, node, tables);
  }
  round_.arrive_and_wait(ExpertSignal::arrived, own * config_.local_world_size,
                         config_.local_world_size, call);
  if (checks_positions) check_positions(call, routing);
  finish_rows(call, tables);
  tables.finish();
}

void HostExpertDispatch::check_positions(const ExpertCall& call,
                                         const HostExpertRouting& routing) const {
  require(routing.wrong_positions.empty(), routing.wrong_positions);
  const ExpertWindow window = own_window(call);
  for (std::int64_t row = 0; row < routing.num_rows(memory_.capacity_rows); ++row) {
    require(window.tag(row).source_rank >= 0, call.operation, ": full_scatter_indices leave row ",
            row, " of rank ", config_.rank,
            " empty: they are not a bijection, or those of another rank were refused");
  }
}

void HostExpertDispatch::finish_rows(const ExpertCall& call, HostExpertTables& tables) const {
  const HostExpertRouting& routing = tables.routing();
  const ExpertWindow window = own_window(call);
  const std::int64_t count = routing.num_rows(memory_.capacity_rows);
  const bool has_weights = tables.has_weights();
  const std::int64_t experts = config_.num_experts_per_rank();
  if (options_.rows == EPRows::grouped) {
    const std::int32_t* const first =
        routing.rows->expert_offsets.data() + config_.rank * (experts + 1);
    for (std::int64_t p = 0; p < experts; ++p) {
      const std::int32_t used = routing.rows->expert_counts[config_.rank * experts + p];
      const std::int64_t end = std::min<std::int64_t>(first[p + 1], memory_.capacity_rows);
      for (std::int64_t row = first[p] + used; row < end; ++row) window.clear(row, has_weights);
    }
  }
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int32_t primary_row = window.tag(row).primary_row;
    if (primary_row >= 0 && primary_row != row) window.copy(primary_row, row);
  }
  if (HostExpertRouting* const made = tables.being_made(); made != nullptr) {
    made->read_tags({&window.tag(0), to_size(count)});
    if (options_.rows == EPRows::compact) {
      made->read_topk({window.topk(0), to_size(count * config_.topk)});
    }
  }
  if (!has_weights) return;
  const std::size_t bytes = count * window.weights_per_row() * window.weight_bytes();
  tables.recv_weights.assign(window.weights(0), window.weights(0) + bytes);
}

}  // namespace waybill::detail
