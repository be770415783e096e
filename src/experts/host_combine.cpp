#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/number.h"
#include "host_executor.h"
#include "moe/row_accumulator.h"

namespace waybill::detail {
namespace {

std::int64_t row_bytes_of(const HostExpertCall& at) {
  return at.config.hidden * dtype_bytes(at.config.token_dtype);
}

/// Whether each rank contributes one row per token.
bool is_once(const HostExpertCall& at, const EPCombineOptions& options) {
  return at.options.rows == EPRows::compact || (options.local_combine && at.config.is_intra_node());
}

/// Whether rows that are not sums already are summed on this rank.
bool sums_locally(const HostExpertCall& at, const EPCombineOptions& options) {
  return is_once(at, options) && at.options.rows == EPRows::grouped;
}

std::int64_t partial_sum_offset(const HostExpertCall& at, std::int32_t node, std::int64_t token) {
  return at.memory.workspace_layout.partial_sums +
         (node * at.config.max_tokens + token) * row_bytes_of(at);
}

/// Whether a token has an expert on a node. @param topk_slots ids of the token
bool is_on_node(const EPConfig& config, std::span<const std::int32_t> topk_slots,
                std::int32_t node) {
  return std::ranges::any_of(topk_slots, [&](std::int32_t id) {
    return config.rank_of_expert(id) / config.local_world_size == node;
  });
}

/// Sums the rows of a token on this rank.
void sum_rows(const HostExpertCall& at, const ExpertCombineInput& input,
              const HostExpertTables& tables, const std::byte* rows, std::int64_t primary_row,
              RowAccumulator& sum) {
  const std::int64_t topk = at.config.topk;
  sum.reset();
  for (std::int64_t k = 0; k < topk; ++k) {
    const std::int32_t row = tables.routing().topk_slot_rows[primary_row * topk + k];
    if (row < 0) continue;
    const std::byte* const from = rows + row * row_bytes_of(at);
    if (input.options.weighted) {
      sum.add_weighted(from, weight_at(tables.recv_weights.data(), row, at.config.weight_dtype));
    } else {
      sum.add(from);
    }
  }
}

/// Brings expert outputs to the window, where other ranks read them. Local sums take the place of
/// the token's first row.
void stage(const HostExpertCall& at, const ExpertCombineInput& input,
           const HostExpertTables& tables, RowAccumulator& sum) {
  std::byte* const window = at.memory.combine_windows[at.call.parity].local;
  const std::int64_t rows = std::min(input.rows.shape[0], at.memory.capacity_rows);
  if (input.rows.data != window && rows > 0) {
    std::memcpy(window, input.rows.data, rows * row_bytes_of(at));
  }
  if (!sums_locally(at, input.options)) return;
  const std::vector<std::int32_t>& primary_rows = tables.routing().primary_rows;
  for (std::int64_t row = 0; row < std::ssize(primary_rows); ++row) {
    if (primary_rows[row] != row) continue;
    sum_rows(at, input, tables, window, row, sum);
    sum.write(window + row * row_bytes_of(at));
  }
}

/// Adds the rows of one token on this node. @param token of the rank of `node` with this local
/// index
void add_token(const HostExpertCall& at, const HostExpertTables& tables, std::int32_t node,
               std::int64_t token, const EPCombineOptions& options, RowAccumulator& sum) {
  const EPConfig& config = at.config;
  const std::int64_t row_bytes = row_bytes_of(at);
  const auto ids = tables.routing().ids_of(node);
  const auto dst_rows = tables.routing().dst_rows_of(node);
  const bool once = is_once(at, options);
  std::array<std::int32_t, max_topk> ranks{};
  auto ranks_end = ranks.begin();
  for (std::int64_t k = 0; k < config.topk; ++k) {
    const std::int64_t entry = token * config.topk + k;
    const std::int32_t rank = config.rank_of_expert(ids[entry]);
    const std::int32_t row = dst_rows[entry];
    if (row < 0 || rank / config.local_world_size != tables.routing().own_node()) continue;
    if (row >= at.memory.capacity_rows) {  // it was lost, so the sum is NaN
      sum.add(std::vector<std::byte>(row_bytes, std::byte{0xFF}).data());
      continue;
    }
    if (once) {
      if (std::find(ranks.begin(), ranks_end, rank) != ranks_end) continue;
      *ranks_end++ = rank;
    }
    const std::byte* const from =
        at.memory.combine_windows[at.call.parity].peers[rank] + row * row_bytes;
    if (options.weighted && !once) {
      sum.add_weighted(from, weight_at(tables.weights_of(node), entry, config.weight_dtype));
    } else {
      sum.add(from);
    }
  }
}

/// Sums this node's rows of the tokens of a node's rank with this local index, and returns them.
void share_node(const HostExpertCall& at, const HostExpertTables& tables, std::int32_t node,
                const EPCombineOptions& options, RowAccumulator& sum) {
  const HostExpertRouting& routing = tables.routing();
  const auto ids = routing.ids_of(node);
  const std::int32_t own = routing.own_node();
  const std::int64_t topk = at.config.topk;
  std::vector<std::byte> share(row_bytes_of(at));
  for (std::int64_t token = 0; token < std::ssize(ids) / topk; ++token) {
    if (!is_on_node(at.config, ids.subspan(token * topk, topk), own)) continue;
    sum.reset();
    add_token(at, tables, node, token, options, sum);
    sum.write(share.data());
    at.put(at.memory.workspace, routing.peer(node), partial_sum_offset(at, own, token),
           share.data(), row_bytes_of(at));
  }
  if (node != own) at.raise(ExpertSignal::shared, routing.peer(node));
}

/// Adds the sums of all nodes for one token of this rank.
void add_partial_sums(const HostExpertCall& at, const HostExpertRouting& routing,
                      std::int64_t token, RowAccumulator& sum) {
  const std::int64_t topk = at.config.topk;
  const auto topk_slots = routing.ids_of(routing.own_node()).subspan(token * topk, topk);
  for (std::int32_t node = 0; node < at.config.num_nodes(); ++node) {
    if (!is_on_node(at.config, topk_slots, node)) continue;
    sum.add(at.workspace<std::byte>(partial_sum_offset(at, node, token)));
  }
}

/// The dot product in the order that ExpertGradientInput says.
template <class Number>
typename Number::Sum dot_product(const typename Number::Stored* a, const typename Number::Stored* b,
                                 std::int64_t count) {
  std::array<typename Number::Sum, gradient_partial_sums> sums{};
  for (std::int64_t i = 0; i < count; ++i) {
    sums[i % gradient_partial_sums] += Number::load(a[i]) * Number::load(b[i]);
  }
  for (std::size_t apart = 1; apart < sums.size(); apart *= 2) {
    for (std::size_t i = 0; i < sums.size(); i += 2 * apart) sums[i] += sums[i + apart];
  }
  return sums[0];
}

template <class Number>
void weigh(const ExpertGradientInput& input, std::int64_t num_rows) {
  using Stored = typename Number::Stored;
  using Sum = typename Number::Sum;
  const std::int64_t hidden = input.gradients.shape[1];
  const auto* const gradients = reinterpret_cast<const Stored*>(input.gradients.data);
  const auto* const rows = reinterpret_cast<const Stored*>(input.rows.data);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const Stored* const gradient = gradients + row * hidden;
    if (is_given(input.rows)) {
      const Sum sum = dot_product<Number>(rows + row * hidden, gradient, hidden);
      if (input.weight_gradients.dtype == DType::float64) {
        reinterpret_cast<double*>(input.weight_gradients.data)[row] = sum;
      } else {
        reinterpret_cast<float*>(input.weight_gradients.data)[row] = static_cast<float>(sum);
      }
    }
    if (!is_given(input.row_gradients)) continue;
    const auto weight = static_cast<Sum>(weight_at(input.weights.data, row, input.weights.dtype));
    Stored* const to = reinterpret_cast<Stored*>(input.row_gradients.data) + row * hidden;
    for (std::int64_t i = 0; i < hidden; ++i) {
      to[i] = Number::round(weight * Number::load(gradient[i]));
    }
  }
}

}  // namespace

void host_combine(const HostExpertCall& at, const ExpertCombineInput& input,
                  const HostExpertTables& tables) {
  const std::int32_t nodes = at.config.num_nodes();
  const HostExpertRouting& routing = tables.routing();
  const std::int32_t own = routing.own_node();
  RowAccumulator sum(at.config.hidden, at.config.token_dtype);
  stage(at, input, tables, sum);
  at.enter();  // all rows are there
  if (nodes > 1) {
    for (std::int32_t k = 0; k < nodes; ++k) {
      share_node(at, tables, (own + k) % nodes, input.options, sum);
    }
    for (std::int32_t k = 1; k < nodes; ++k) {
      at.wait_for(ExpertSignal::shared, routing.peer((own + nodes - k) % nodes));
    }
  }
  const std::int64_t row_bytes = row_bytes_of(at);
  for (std::int64_t token = 0; token < input.output.shape[0]; ++token) {
    sum.reset();
    for (const ConstTensorView& bias : input.biases) sum.add(bias.data + token * row_bytes);
    if (nodes > 1) {
      add_partial_sums(at, routing, token, sum);
    } else {
      add_token(at, tables, own, token, input.options, sum);
    }
    sum.write(input.output.data + token * row_bytes);
  }
}

void weigh_gradients(const ExpertGradientInput& input, std::int64_t num_rows) {
  (void)for_number(input.gradients.dtype,
                   [&]<class Number>(Number /*is*/) { weigh<Number>(input, num_rows); });
}

}  // namespace waybill::detail
