#include "host_expert_combine.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace waybill::detail {

void HostExpertCombine::stage(const ExpertCall& call, const ExpertCombineInput& input) const {
  std::byte* const window = memory_.combine_windows[call.parity].local;
  const std::int64_t rows = std::min(input.rows.shape[0], memory_.capacity_rows);
  if (input.rows.data == window || rows == 0) return;
  std::memcpy(window, input.rows.data, rows * row_bytes_);
}

/// The rows of a token on this rank become one.
void HostExpertCombine::sum_local(const ExpertCombineInput& input, const HostExpertTables& tables,
                                  const std::byte* rows, std::int64_t primary_row) {
  const HostExpertRouting& routing = tables.routing();
  sum_.reset();
  for (std::int64_t k = 0; k < config_.topk; ++k) {
    const std::int32_t row = routing.topk_slot_rows[primary_row * config_.topk + k];
    if (row < 0) continue;
    const std::byte* const from = rows + row * row_bytes_;
    if (input.options.weighted) {
      sum_.add_weighted(from, weight_at(tables.recv_weights.data(), row, config_.weight_dtype));
    } else {
      sum_.add(from);
    }
  }
}

/// In the place of the first, for others to read.
void HostExpertCombine::sum_in_window(const ExpertCall& call, const ExpertCombineInput& input,
                                      const HostExpertTables& tables) {
  const HostExpertRouting& routing = tables.routing();
  std::byte* const window = memory_.combine_windows[call.parity].local;
  for (std::int64_t row = 0; row < std::ssize(routing.primary_rows); ++row) {
    if (routing.primary_rows[row] != row) continue;
    sum_local(input, tables, window, row);
    sum_.write(window + row * row_bytes_);
  }
}

/// Each row to its token's home, where it has a place. The slab was read in the combine before the
/// last, and all ranks have entered that.
void HostExpertCombine::push(const ExpertCall& call, const ExpertCombineInput& input,
                             const HostExpertTables& tables) {
  const HostExpertRouting& routing = tables.routing();
  const SymmetricBuffer& slabs = memory_.receive_slabs[call.parity];
  const bool sums = input.options.local_combine && !compact_;
  std::vector<std::byte> share(row_bytes_);
  const std::int64_t rows = std::min(input.rows.shape[0], std::ssize(routing.tags));
  for (std::int64_t row = 0; row < rows; ++row) {
    const RowTag& tag = routing.tags[row];
    if (tag.source_rank < 0 || (sums && routing.primary_rows[row] != row)) continue;
    const std::byte* data = input.rows.data + row * row_bytes_;
    if (sums) {
      sum_local(input, tables, input.rows.data, row);
      sum_.write(share.data());
      data = share.data();
    }
    const std::int64_t place =
        slab_row(config_, is_once(input.options), config_.rank, tag.token, tag.topk_slot);
    round_.put(slabs, tag.source_rank, place * row_bytes_, data, row_bytes_);
  }
}

/// Adds the rows of one token on this node: all of one node's world, this node's share else.
void HostExpertCombine::add_token(const ExpertCall& call, const HostExpertTables& tables,
                                  std::int32_t node, std::int64_t token,
                                  const EPCombineOptions& options) {
  const HostExpertRouting& routing = tables.routing();
  const auto ids = routing.ids_of(node);
  const auto places = routing.places_of(node);
  const bool once_a_rank = is_once(options);
  const bool pushed = pushes(options);
  const bool weighted = options.weighted && !once_a_rank;
  std::array<std::int32_t, max_topk> ranks{};
  std::size_t num_ranks = 0;
  for (std::int64_t k = 0; k < config_.topk; ++k) {
    const std::size_t entry = token * config_.topk + k;
    const std::int32_t rank = config_.rank_of_expert(ids[entry]);
    const std::int32_t row = places[entry];
    if (rank / config_.local_world_size != routing.own_node()) continue;
    if (row < 0) continue;
    if (row >= memory_.capacity_rows) {  // it was lost: so is the sum
      sum_.add(nan_row_.data());
      continue;
    }
    if (once_a_rank) {
      const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(num_ranks);
      if (std::find(ranks.begin(), end, rank) != end) continue;
      ranks[num_ranks++] = rank;
    }
    const std::byte* const from =
        pushed ? memory_.receive_slabs[call.parity].local +
                     slab_row(config_, once_a_rank, rank, token, k) * row_bytes_
               : memory_.combine_windows[call.parity].peers[rank] + row * row_bytes_;
    if (weighted) {
      sum_.add_weighted(from, weight_at(tables.weights_of(node), static_cast<std::int64_t>(entry),
                                        config_.weight_dtype));
    } else {
      sum_.add(from);
    }
  }
}

/// Sums this node's rows of the tokens of a node's rank of the same local index, and returns them.
void HostExpertCombine::share_node(const ExpertCall& call, const HostExpertTables& tables,
                                   std::int32_t node, const EPCombineOptions& options) {
  const HostExpertRouting& routing = tables.routing();
  const auto ids = routing.ids_of(node);
  const std::int32_t own = routing.own_node();
  std::vector<std::byte> share(row_bytes_);
  for (std::int64_t token = 0; token < std::ssize(ids) / config_.topk; ++token) {
    const auto topk_slots = ids.subspan(token * config_.topk, config_.topk);
    const bool here = std::ranges::any_of(topk_slots, [&](std::int32_t id) {
      return config_.rank_of_expert(id) / config_.local_world_size == own;
    });
    if (!here) continue;
    sum_.reset();
    add_token(call, tables, node, token, options);
    sum_.write(share.data());
    round_.post(routing.peer(node), partial_sum_offset(own, token), share.data(), row_bytes_);
  }
  if (node != own) round_.raise(ExpertSignal::shared, routing.peer(node), call);
}

void HostExpertCombine::add_partial_sums(const HostExpertRouting& routing, std::int64_t token) {
  const auto ids = routing.ids_of(routing.own_node());
  const auto topk_slots = ids.subspan(token * config_.topk, config_.topk);
  for (std::int32_t node = 0; node < config_.num_nodes(); ++node) {
    const bool has_expert = std::ranges::any_of(topk_slots, [&](std::int32_t id) {
      return config_.rank_of_expert(id) / config_.local_world_size == node;
    });
    if (has_expert) sum_.add(round_.read<std::byte>(partial_sum_offset(node, token)));
  }
}

void HostExpertCombine::add_biases(const ExpertCombineInput& input, std::int64_t token) {
  for (const ConstTensorView& bias : input.biases) sum_.add(bias.data + token * row_bytes_);
}

void HostExpertCombine::run(const ExpertCall& call, const ExpertCombineInput& input,
                            const HostExpertTables& tables) {
  const std::int32_t nodes = config_.num_nodes();
  const HostExpertRouting& routing = tables.routing();
  const std::int32_t own = routing.own_node();
  if (pushes(input.options)) {
    push(call, input, tables);
  } else {
    stage(call, input);
    if (input.options.local_combine && nodes == 1 && !compact_) sum_in_window(call, input, tables);
  }
  round_.enter(call);  // all rows are there
  if (nodes > 1) {
    for (std::int32_t k = 0; k < nodes; ++k) {
      share_node(call, tables, (own + k) % nodes, input.options);
    }
    for (std::int32_t k = 1; k < nodes; ++k) {
      round_.wait_for(ExpertSignal::shared, routing.peer((own + nodes - k) % nodes), call);
    }
  }
  for (std::int64_t token = 0; token < input.output.shape[0]; ++token) {
    sum_.reset();
    add_biases(input, token);
    if (nodes > 1) {
      add_partial_sums(routing, token);
    } else {
      add_token(call, tables, own, token, input.options);
    }
    sum_.write(input.output.data + token * row_bytes_);
  }
}

}  // namespace waybill::detail
