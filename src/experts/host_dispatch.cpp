#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "core/to_size.h"
#include "host_executor.h"
#include "moe/input_checks.h"
#include "waybill/core/error.h"
#include "waybill/core/table_allocator.h"
#include "waybill/moe/payload_format.h"

namespace waybill::detail {
namespace {

/// All ranks compute the same tables of a call, so the ranks that are threads of one process share
/// them. At 1024 ranks the rows take 17 MB.
/// @param memory one part of the layer's memory, the same for all
template <class Tables>
std::shared_ptr<const Tables> share_tables(const std::shared_ptr<void>& memory, std::uint64_t epoch,
                                           const std::function<Tables()>& make) {
  using Shared = std::pair<std::mutex, std::optional<Tables>>;  // held while they are made
  using Calls = std::map<std::uint64_t, std::weak_ptr<Shared>>;
  static std::mutex mutex;
  static std::map<std::weak_ptr<void>, Calls, std::owner_less<>> layers;
  std::shared_ptr<Shared> shared;
  {
    const std::lock_guard lock(mutex);
    Calls& calls = layers[memory];
    shared = calls[epoch].lock();
    if (shared == nullptr) {
      calls[epoch] = shared = std::make_shared<Shared>();
      std::erase_if(calls, [](const auto& call) { return call.second.expired(); });
      std::erase_if(layers, [](const auto& layer) { return layer.first.expired(); });
    }
  }
  const std::lock_guard lock(shared->first);
  if (!shared->second) shared->second = make();
  const Tables* const tables = &*shared->second;
  return {std::move(shared), tables};
}

std::int64_t slice(const HostExpertCall& at, std::int32_t node) {
  return node * at.config.max_tokens;
}

std::byte* own_window(const HostExpertCall& at) {
  return at.memory.dispatch_windows[at.call.parity].local;
}

RowTag& tag_of(const ExpertWindowLayout& layout, std::byte* window, std::int64_t row) {
  return reinterpret_cast<RowTag*>(window + layout.tags)[row];
}

std::byte* weights_of(const ExpertWindowLayout& layout, std::byte* window, std::int64_t row) {
  return window + layout.weights + row * layout.weights_per_row * layout.weight_bytes;
}

void clear_tags(const HostExpertCall& at, HostExpertRouting& routing) {
  routing.cleared_window = own_window(at);
  for (std::int64_t row = 0; row < at.memory.capacity_rows; ++row) {
    tag_of(at.memory.window, own_window(at), row).source_rank = -1;
  }
}

/// The counts of all ranks, which each rank keeps in its own workspace: copies for the others would
/// be W^2 num_counts integers, 8.6 GB for 1024 ranks with an expert each. They stay until all ranks
/// have entered the next dispatch, and so left this one.
/// @param offsets of the counts in the workspace, by parity. @param config whose experts they count
std::vector<std::span<const std::int32_t>> counts_of_all(const HostExpertCall& at,
                                                         const std::int64_t (&offsets)[2],
                                                         const EPConfig& config) {
  std::vector<std::span<const std::int32_t>> counts;
  for (std::int32_t r = 0; r < at.config.world_size; ++r) {
    const auto* const part = static_cast<const std::byte*>(at.memory.workspace.memory[r].get());
    counts.emplace_back(reinterpret_cast<const std::int32_t*>(part + offsets[at.call.parity]),
                        num_counts(config));
  }
  return counts;
}

void put_counts(const HostExpertCall& at, const std::int64_t (&offsets)[2],
                const std::vector<std::int32_t>& counts) {
  at.put(at.memory.workspace, at.config.rank, offsets[at.call.parity], counts.data(),
         std::ssize(counts) * std::int64_t{sizeof(counts[0])});
}

/// The experts in the spare slots of an earlier dispatch, as EvenExpertsOptions::present.
std::vector<std::int32_t> copies_of(const HostExpertCall& at, const ExpertTables* earlier) {
  std::vector<std::int32_t> present;
  if (earlier == nullptr) return present;
  const auto& plan = static_cast<const HostExpertTables*>(earlier)->routing().slots->plan;
  const std::int32_t homes = at.experts.num_experts_per_rank();
  for (std::int64_t i = 0; i < std::ssize(plan.slots); ++i) {
    if (i % plan.slots_per_rank >= homes) present.push_back(plan.slots[i]);
  }
  return present;
}

/// Plans copies from the counts of all ranks, puts slots in place of ids and exchanges their
/// counts.
std::vector<std::int32_t> slots_of(const HostExpertCall& at, const std::vector<std::int32_t>& ids,
                                   HostExpertRouting& routing) {
  const ExpertWorkspaceLayout& workspace = at.memory.workspace_layout;
  routing.slots = share_tables<ExpertSlots>(at.memory.workspace.memory.front(), at.call.epoch, [&] {
    return plan_slots(at.experts, at.options, counts_of_all(at, workspace.counts, at.experts),
                      copies_of(at, at.call.present));
  });
  const auto& [rows, plan] = *routing.slots;
  routing.slot_quotas.assign(plan.quotas.begin(), plan.quotas.end());
  auto slots = slot_ids(plan, rows, ids, at.config.rank);
  put_counts(at, workspace.slot_counts, count_topk_slots(at.config, slots));
  at.raise_and_wait(ExpertSignal::planned, at.config.world_size);
  return slots;
}

void take_weights(const HostExpertCall& at, const ExpertDispatchInput& input,
                  HostExpertTables& tables) {
  if (!is_given(input.weights)) return;
  tables.carry_weights();
  const HostExpertRouting& routing = tables.routing();
  const auto own = routing.ids_of(routing.own_node());
  if (own.empty()) return;
  std::memcpy(tables.weights_of(routing.own_node()), input.weights.data,
              own.size() * dtype_bytes(at.config.weight_dtype));
}

/// Finds the rows of the topk slots of a node's rank with this local index.
void place(const HostExpertCall& at, std::int32_t node, HostExpertRouting& routing) {
  const std::int32_t source = routing.peer(node);
  const auto ids = routing.ids_of(node);
  const auto out = routing.dst_rows_of(node);
  if (routing.positions.empty()) {
    const auto dst_rows = place_topk_slots(at.config, at.options, *routing.rows, source, ids);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::int32_t rank = at.config.rank_of_expert(ids[i]);
      if (rank / at.config.local_world_size == routing.own_node()) out[i] = dst_rows[i];
    }
    return;
  }
  std::int64_t first = 0;
  for (std::int32_t r = 0; r < source; ++r) first += routing.rows->num_input_tokens[r];
  const auto positions = std::span(routing.positions).subspan(first * at.config.topk, ids.size());
  std::ranges::copy(
      place_by_scatter_indices(at.config, *routing.rows, source, ids, positions, "dispatch"),
      out.begin());
}

void place_own(const HostExpertCall& at, HostExpertRouting& routing) {
  std::int64_t tokens = 0;
  for (const std::int32_t count : routing.rows->num_input_tokens) tokens += count;
  const std::int64_t topk = at.config.topk;
  try {
    require(routing.positions.empty() || std::ssize(routing.positions) == tokens * topk,
            "dispatch: full_scatter_indices has ", std::ssize(routing.positions) / topk,
            " tokens, expected ", tokens, ": those of all ranks, one rank after another");
    place(at, routing.own_node(), routing);
  } catch (const InvalidArgument& error) {  // the others count on this rank's part of the call
    routing.wrong_positions = error.what();
  }
}

/// Takes the ids that another node's rank has sent.
void place_forwarded(const HostExpertCall& at, std::int32_t node, HostExpertRouting& routing) {
  const auto ids = routing.ids_of(node);
  const std::int64_t entry = slice(at, node) * at.config.topk;
  const auto* const from = at.workspace<std::int32_t>(at.memory.workspace_layout.forward_ids +
                                                      entry * std::int64_t{sizeof(std::int32_t)});
  std::copy_n(from, ids.size(), ids.begin());
  if (routing.wrong_positions.empty()) {  // else there may be none of these tokens
    try {
      place(at, node, routing);
    } catch (const InvalidArgument& error) {
      routing.wrong_positions = error.what();
    }
  }
  const auto sent = node_send_requests(at.config, routing.peer(node), ids);
  const std::int64_t plane = 2 * at.config.max_tokens;
  std::copy_n(sent.begin() + routing.own_node() * plane, plane,
              routing.send_reqs.begin() + node * plane);
}

/// The tokens of one source on their way: contiguous, in the form in which they travel.
struct TokenBlock {
  const std::byte* rows = nullptr;    ///< [T, row_bytes]
  const std::byte* scales = nullptr;  ///< [T, scale_bytes]
};

void write_payload(const ExpertWindowLayout& layout, std::byte* window, const TokenBlock& from,
                   std::int64_t token, std::int32_t row) {
  std::memcpy(window + layout.rows + row * layout.row_bytes, from.rows + token * layout.row_bytes,
              layout.row_bytes);
  if (layout.scale_bytes == 0) return;
  std::memcpy(window + layout.scales + row * layout.scale_bytes,
              from.scales + token * layout.scale_bytes, layout.scale_bytes);
}

/// Writes everything of a compact row but the payload, for all topk slots of the token on its rank.
/// @param ids [K] of the token. @param weights [K] of the token; null without
/// @param first the first topk slot of the token on the rank
void write_compact_row(const HostExpertCall& at, std::byte* window, std::int32_t row, RowTag tag,
                       std::span<const std::int32_t> ids, const std::byte* weights) {
  const ExpertWindowLayout& layout = at.memory.window;
  const std::int64_t topk = at.config.topk;
  const std::int64_t bytes = layout.weight_bytes;
  const std::int32_t rank = at.config.rank_of_expert(ids[tag.topk_slot]);
  tag_of(layout, window, row) = tag;
  std::byte* const to_weights = weights_of(layout, window, row);
  auto* const to_topk = reinterpret_cast<std::int32_t*>(window + layout.topk) + row * topk;
  if (weights != nullptr) std::memset(to_weights, 0, bytes * topk);
  for (std::int64_t k = 0; k < topk; ++k) {
    const bool here = at.config.rank_of_expert(ids[k]) == rank;
    to_topk[k] = here ? ids[k] % at.config.num_experts_per_rank() : -1;
    if (here && weights != nullptr) std::memcpy(to_weights + bytes * k, weights + bytes * k, bytes);
  }
}

/// Writes one token of a node's rank into the windows of this node: the payload once per rank, to
/// the row of the first topk slot there; tags and weights to the row of each topk slot. Rows past
/// the capacity stay out.
void deliver_token(const HostExpertCall& at, std::int32_t node, std::int64_t token,
                   const TokenBlock& payload, const HostExpertTables& tables) {
  const EPConfig& config = at.config;
  const ExpertWindowLayout& layout = at.memory.window;
  const HostExpertRouting& routing = tables.routing();
  const std::int64_t topk = config.topk;
  const auto ids = routing.ids_of(node).subspan(token * topk, topk);
  const auto rows = routing.dst_rows_of(node).subspan(token * topk, topk);
  const std::byte* weights = tables.weights_of(node);
  if (weights != nullptr) weights += token * topk * layout.weight_bytes;
  std::array<std::int32_t, max_topk> first_slots{};  // -1: none of a rank, or its row stays out
  for (std::int32_t k = 0; k < topk; ++k) {
    first_slots[k] = -1;
    const std::int32_t rank = config.rank_of_expert(ids[k]);
    const std::int32_t row = rows[k];
    if (rank / config.local_world_size != routing.own_node()) continue;
    if (row < 0 || row >= at.memory.capacity_rows) continue;
    std::byte* const window = at.memory.dispatch_windows[at.call.parity].peers[rank];
    std::int32_t first = 0;
    while (first < k && (first_slots[first] != first || config.rank_of_expert(ids[first]) != rank))
      ++first;
    first_slots[k] = first;
    if (first == k) write_payload(layout, window, payload, token, row);
    const RowTag tag{routing.peer(node), static_cast<std::int32_t>(token), k, rows[first]};
    if (at.options.rows == EPRows::compact) {
      if (first == k) write_compact_row(at, window, row, tag, ids, weights);
      continue;
    }
    tag_of(layout, window, row) = tag;
    if (weights == nullptr) continue;
    std::memcpy(weights_of(layout, window, row), weights + k * layout.weight_bytes,
                layout.weight_bytes);
  }
}

void deliver(const HostExpertCall& at, std::int32_t node, const TokenBlock& payload,
             const HostExpertTables& tables) {
  const HostExpertRouting& routing = tables.routing();
  if (!routing.wrong_positions.empty()) return;
  const std::int64_t tokens = std::ssize(routing.ids_of(node)) / at.config.topk;
  for (std::int64_t t = 0; t < tokens; ++t) deliver_token(at, node, t, payload, tables);
}

void send_to_node(const HostExpertCall& at, std::int32_t node, const TokenBlock& payload,
                  const HostExpertTables& tables) {
  const ExpertWorkspaceLayout& workspace = at.memory.workspace_layout;
  const ExpertWindowLayout& window = at.memory.window;
  const HostExpertRouting& routing = tables.routing();
  const std::int32_t peer = routing.peer(node);
  const std::int32_t own = routing.own_node();
  const auto ids = routing.ids_of(own);
  const auto ranges = node_send_requests(at.config, at.config.rank, ids);
  const std::int32_t* const starts = ranges.data() + slice(at, node) * 2;
  const std::int32_t* const ends = starts + at.config.max_tokens;
  for (std::int64_t run = 0; run < at.config.max_tokens; ++run) {
    if (starts[run] < 0) continue;
    const auto send = [&](std::int64_t part, const std::byte* from, std::int64_t bytes) {
      at.put(at.memory.workspace, peer, part + (slice(at, own) + starts[run]) * bytes,
             from + starts[run] * bytes, (ends[run] - starts[run]) * bytes);
    };
    send(workspace.forward_rows, payload.rows, window.row_bytes);
    if (window.scale_bytes > 0) send(workspace.forward_scales, payload.scales, window.scale_bytes);
  }
  if (!ids.empty()) {
    const std::int64_t entry = slice(at, own) * at.config.topk;
    const auto send = [&](std::int64_t part, const void* from, std::int64_t bytes) {
      at.put(at.memory.workspace, peer, part + entry * bytes, from, std::ssize(ids) * bytes);
    };
    send(workspace.forward_ids, ids.data(), sizeof(ids[0]));
    if (const std::byte* const weights = tables.weights_of(own); weights != nullptr) {
      send(workspace.forward_weights, weights, window.weight_bytes);
    }
  }
  at.raise(ExpertSignal::forwarded, peer);
}

/// Hands the tokens that another node's rank has sent to the ranks of this node.
void take_from_node(const HostExpertCall& at, std::int32_t node, HostExpertTables& tables) {
  const ExpertWorkspaceLayout& workspace = at.memory.workspace_layout;
  const ExpertWindowLayout& window = at.memory.window;
  if (HostExpertRouting* const made = tables.being_made(); made != nullptr) {
    place_forwarded(at, node, *made);
  }
  if (std::byte* const weights = tables.weights_of(node); weights != nullptr) {
    const std::int64_t entry = slice(at, node) * at.config.topk;
    std::memcpy(weights,
                at.workspace<std::byte>(workspace.forward_weights + entry * window.weight_bytes),
                tables.routing().ids_of(node).size() * window.weight_bytes);
  }
  const std::int64_t first = slice(at, node);
  deliver(at, node,
          {at.workspace<std::byte>(workspace.forward_rows + first * window.row_bytes),
           at.workspace<std::byte>(workspace.forward_scales + first * window.scale_bytes)},
          tables);
}

void check_positions(const HostExpertCall& at, const HostExpertRouting& routing) {
  require(routing.wrong_positions.empty(), routing.wrong_positions);
  for (std::int64_t row = 0; row < routing.num_rows(at.memory.capacity_rows); ++row) {
    require(tag_of(at.memory.window, own_window(at), row).source_rank >= 0, at.call.operation,
            ": full_scatter_indices leave row ", row, " of rank ", at.config.rank,
            " empty: they are not a bijection, or those of another rank were refused");
  }
}

/// Makes the rows of padding after those of each expert.
void clear_padding(const HostExpertCall& at, const HostExpertTables& tables) {
  const ExpertWindowLayout& layout = at.memory.window;
  const ExpertRows& rows = *tables.routing().rows;
  std::byte* const window = own_window(at);
  const std::int64_t experts = at.config.num_experts_per_rank();
  const std::int32_t* const first = rows.expert_offsets.data() + at.config.rank * (experts + 1);
  for (std::int64_t p = 0; p < experts; ++p) {
    const std::int32_t used = rows.expert_counts[at.config.rank * experts + p];
    const std::int64_t end = std::min<std::int64_t>(first[p + 1], at.memory.capacity_rows);
    for (std::int64_t row = first[p] + used; row < end; ++row) {
      std::memset(window + layout.rows + row * layout.row_bytes, 0, layout.row_bytes);
      std::memset(window + layout.scales + row * layout.scale_bytes, 0, layout.scale_bytes);
      if (tables.has_weights()) {
        std::memset(weights_of(layout, window, row), 0, layout.weight_bytes);
      }
      tag_of(layout, window, row) = {-1, -1, -1, -1};
    }
  }
}

/// Copies payload and scales to the further rows of each token, and fills the tables.
void finish_rows(const HostExpertCall& at, HostExpertTables& tables) {
  const ExpertWindowLayout& layout = at.memory.window;
  std::byte* const window = own_window(at);
  const std::int64_t count = tables.routing().num_rows(at.memory.capacity_rows);
  if (at.options.rows == EPRows::grouped) clear_padding(at, tables);
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int32_t primary_row = tag_of(layout, window, row).primary_row;
    if (primary_row < 0 || primary_row == row) continue;
    for (const auto& [part, bytes] :
         {std::pair{layout.rows, layout.row_bytes}, {layout.scales, layout.scale_bytes}}) {
      std::memcpy(window + part + row * bytes, window + part + primary_row * bytes, bytes);
    }
  }
  if (HostExpertRouting* const made = tables.being_made(); made != nullptr) {
    made->read_tags({&tag_of(layout, window, 0), to_size(count)});
    if (at.options.rows == EPRows::compact) {
      made->read_topk({reinterpret_cast<const std::int32_t*>(window + layout.topk),
                       to_size(count * at.config.topk)});
    }
  }
  if (!tables.has_weights()) return;
  const std::byte* const weights = window + layout.weights;
  tables.recv_weights.assign(weights,
                             weights + count * layout.weights_per_row * layout.weight_bytes);
}

}  // namespace

std::shared_ptr<HostExpertTables> host_route(const HostExpertCall& at,
                                             const ExpertDispatchInput& input) {
  const EPConfig& config = at.config;
  const ExpertWorkspaceLayout& workspace = at.memory.workspace_layout;
  const bool has_spare = at.options.spare_experts > 0;
  const auto routing = std::make_shared<HostExpertRouting>(config, at.options);
  auto ids = read_expert_ids(at.experts, at.options, input.ids, at.call.operation);
  if (is_given(input.full_scatter_indices)) {
    routing->positions = read_integers(input.full_scatter_indices);
  }
  if (!routing->positions.empty()) clear_tags(at, *routing);
  const auto counts = count_topk_slots(at.experts, ids);
  for (std::int32_t e = 0; at.call.max_per_expert > 0 && e < at.experts.num_experts; ++e) {
    require(counts[e] <= at.call.max_per_expert, at.call.operation, ": exp_indices of rank ",
            config.rank, " hold expert ", e, " more than max_per_expert = ", at.call.max_per_expert,
            " times");
  }
  put_counts(at, workspace.counts, counts);
  at.enter();
  if (has_spare) ids = slots_of(at, ids, *routing);
  routing->rows = share_tables<ExpertRows>(at.memory.workspace.memory.front(), at.call.epoch, [&] {
    return locate_rows(
        config, at.options,
        counts_of_all(at, has_spare ? workspace.slot_counts : workspace.counts, config));
  });
  routing->required_rows = static_cast<std::int32_t>(routing->rows->largest_recv_rows);
  routing->dst_rows.assign(slice(at, config.num_nodes()) * config.topk, -1);
  if (config.is_intra_node()) {
    routing->ids = ids;
  } else {
    routing->ids.assign(routing->dst_rows.size(), -1);
    routing->send_reqs.assign(slice(at, config.num_nodes()) * 2, -1);
    std::ranges::copy(ids, routing->ids_of(routing->own_node()).begin());
  }
  place_own(at, *routing);
  auto tables = std::make_shared<HostExpertTables>(routing, config.weight_dtype, routing);
  take_weights(at, input, *tables);
  return tables;
}

std::shared_ptr<HostExpertTables> host_enter(const HostExpertCall& at,
                                             const ExpertDispatchInput& input,
                                             const HostExpertTables& earlier) {
  auto tables =
      std::make_shared<HostExpertTables>(earlier.shared_routing(), at.config.weight_dtype);
  take_weights(at, input, *tables);
  at.enter();
  return tables;
}

void host_dispatch(const HostExpertCall& at, const ExpertDispatchInput& input,
                   HostExpertTables& tables) {
  HostExpertRouting* const made = tables.being_made();
  const bool checks_positions = made != nullptr && !made->positions.empty();
  if (checks_positions && made->cleared_window != own_window(at)) {
    clear_tags(at, *made);  // the windows have grown since route: on all ranks
    at.transport.barrier(at.call.operation);
  }
  TokenBlock payload{input.tokens.data, input.scales.data};
  UninitializedVector<std::uint8_t> elements;
  UninitializedVector<std::uint8_t> scales;
  if (at.options.payload.is_quantized()) {
    const std::int64_t tokens = input.tokens.shape[0];
    const std::int64_t row_bytes = payload_row_bytes(at.config, at.options);
    const std::int64_t scale_bytes = scale_row_bytes(at.config, at.options);
    elements.resize(tokens * row_bytes);
    scales.resize(tokens * scale_bytes);
    const std::int64_t bytes = at.config.hidden * dtype_bytes(input.tokens.dtype);
    for (std::int64_t t = 0; t < tokens; ++t) {
      quantize_row(at.options.payload.format(), input.tokens.data + t * bytes, input.tokens.dtype,
                   std::span(elements).subspan(t * row_bytes, row_bytes),
                   std::span(scales).subspan(t * scale_bytes, scale_bytes));
    }
    payload = {reinterpret_cast<const std::byte*>(elements.data()),
               reinterpret_cast<const std::byte*>(scales.data())};
  }
  const HostExpertRouting& routing = tables.routing();
  const std::int32_t nodes = at.config.num_nodes();
  const std::int32_t own = routing.own_node();
  for (std::int32_t k = 1; k < nodes; ++k) send_to_node(at, (own + k) % nodes, payload, tables);
  deliver(at, own, payload, tables);
  for (std::int32_t k = 1; k < nodes; ++k) {
    const std::int32_t node = (own + nodes - k) % nodes;
    at.wait_for(ExpertSignal::forwarded, routing.peer(node));
    take_from_node(at, node, tables);
  }
  at.raise_and_wait(ExpertSignal::arrived, at.config.local_world_size);
  if (checks_positions) check_positions(at, routing);
  finish_rows(at, tables);
  tables.finish();
}

}  // namespace waybill::detail
