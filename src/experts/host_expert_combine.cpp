#include "host_expert_combine.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace waybill::detail {

void HostExpertCombine::stage(const ExpertCall& call, const ExpertCombineInput& input) const {
  std::byte* const window = memory_.combine_windows[call.parity].local;
  const std::int64_t rows = std::min(input.rows.shape[0], memory_.capacity_rows);
  if (input.rows.data == window || rows == 0) return;
  std::memcpy(window, input.rows.data, to_size(rows * row_bytes_));
}

/// The rows of a token on this rank become one, in the place of the first.
void HostExpertCombine::sum_local(const ExpertCall& call, const ExpertCombineInput& input,
                                  const HostExpertTables& tables) {
  const HostExpertRouting& routing = tables.routing();
  std::byte* const window = memory_.combine_windows[call.parity].local;
  const std::int64_t topk = config_.topk;
  for (std::int64_t primary_row = 0; primary_row < std::ssize(routing.primary_rows);
       ++primary_row) {
    if (routing.primary_rows[to_size(primary_row)] != primary_row) continue;
    sum_.reset();
    for (std::int64_t k = 0; k < topk; ++k) {
      const std::int32_t row = routing.topk_slot_rows[to_size(primary_row * topk + k)];
      if (row < 0) continue;
      const std::byte* const from = window + row * row_bytes_;
      if (input.options.weighted) {
        sum_.add_weighted(from, weight_at(tables.recv_weights.data(), row, config_.weight_dtype));
      } else {
        sum_.add(from);
      }
    }
    sum_.write(window + primary_row * row_bytes_);
  }
}

/// Adds the rows of one token on this node: all of one node's world, this node's share else.
void HostExpertCombine::add_token(const ExpertCall& call, const HostExpertTables& tables,
                                  std::int32_t node, std::int64_t token,
                                  const EPCombineOptions& options) {
  const HostExpertRouting& routing = tables.routing();
  const auto ids = routing.ids_of(node);
  const auto places = routing.places_of(node);
  const bool once_a_rank = compact_ || (options.local_combine && config_.is_intra_node());
  const bool weighted = options.weighted && !once_a_rank;
  std::array<std::int32_t, max_topk> ranks{};
  std::size_t num_ranks = 0;
  for (std::int64_t k = 0; k < config_.topk; ++k) {
    const auto entry = to_size(token * config_.topk + k);
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
        memory_.combine_windows[call.parity].peers[to_size(rank)] + row * row_bytes_;
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
  std::vector<std::byte> share(to_size(row_bytes_));
  for (std::int64_t token = 0; token < std::ssize(ids) / config_.topk; ++token) {
    const auto topk_slots = ids.subspan(to_size(token * config_.topk), to_size(config_.topk));
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
  const auto topk_slots = ids.subspan(to_size(token * config_.topk), to_size(config_.topk));
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
  stage(call, input);
  if (input.options.local_combine && nodes == 1 && !compact_) sum_local(call, input, tables);
  round_.enter(call);
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
