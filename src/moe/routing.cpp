#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "moe/input_checks.h"
#include "waybill/core/error.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {
namespace {

/// Calls visit(row, column, value) for each element of a matrix.
template <class Integer, class Visit>
void visit_integers(const ConstTensorView& view, Visit&& visit) {
  for (std::int64_t row = 0; row < view.shape[0]; ++row) {
    for (std::int64_t col = 0; col < view.shape[1]; ++col) {
      const std::byte* const place = view.data + (row * view.strides[0] + col * view.strides[1]) *
                                                     static_cast<std::int64_t>(sizeof(Integer));
      visit(row, col, std::int64_t{*reinterpret_cast<const Integer*>(place)});
    }
  }
}

template <class Id>
std::vector<std::int32_t> read_ids(const EPConfig& config, const EPDispatchOptions& options,
                                   const ConstTensorView& ids, const char* who) {
  const std::int64_t dropped = options.dropped(config);
  std::vector<std::int32_t> result(ids.shape[0] * config.topk);
  visit_integers<Id>(ids, [&](std::int64_t t, std::int64_t k, std::int64_t id) {
    require((0 <= id && id < config.num_experts) || id == dropped, who, ": exp_indices[", t, "][",
            k, "] = ", id, ", expected 0..", config.num_experts - 1, ", or ", dropped,
            " for a dropped topk slot");
    result[t * config.topk + k] =
        static_cast<std::int32_t>(id == dropped ? config.num_experts : id);
  });
  return result;
}

/// Fills the segments of one receiver, by local expert and source.
void locate_segments(const EPConfig& config, const EPDispatchOptions& options, std::int32_t dst,
                     ExpertRows& rows) {
  const std::int64_t world = config.world_size;
  const std::int64_t experts = config.num_experts_per_rank();
  std::int32_t base = 0;
  for (std::int64_t p = 0; p < experts; ++p) {
    std::int32_t next = base;
    for (std::int64_t src = 0; src < world; ++src) {
      rows.segment_offsets[(dst * experts + p) * world + src] = next;
      next += rows.splits[src * (config.num_experts + 1) + dst * experts + p];
    }
    rows.expert_counts[dst * experts + p] = next - base;
    rows.expert_offsets[dst * (experts + 1) + p] = base;
    const std::int64_t alignment = options.expert_alignment;
    base += static_cast<std::int32_t>((next - base + alignment - 1) / alignment * alignment);
  }
  rows.expert_offsets[dst * (experts + 1) + experts] = base;

  std::int32_t compact = 0;
  for (std::int64_t src = 0; src < world; ++src) {
    rows.compact_offsets[dst * (world + 1) + src] = compact;
    compact += rows.rank_tokens[src * world + dst];
  }
  rows.compact_offsets[dst * (world + 1) + world] = compact;
  rows.num_recv_rows[dst] = options.rows == EPRows::grouped ? base : compact;
}

std::vector<std::int32_t> place_grouped(const EPConfig& config, const ExpertRows& rows,
                                        std::int32_t source, std::span<const std::int32_t> ids) {
  std::vector<std::int32_t> next(config.num_experts);
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    next[e] = rows.segment_offsets[e * config.world_size + source];
  }
  std::vector<std::int32_t> dst_row(ids.size(), -1);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] != config.num_experts) dst_row[i] = next[ids[i]]++;
  }
  return dst_row;
}

std::vector<std::int32_t> place_compact(const EPConfig& config, const ExpertRows& rows,
                                        std::int32_t source, std::span<const std::int32_t> ids) {
  const std::int64_t world = config.world_size;
  const std::int64_t topk = config.topk;
  std::vector<std::int32_t> next(world);
  for (std::int64_t dst = 0; dst < world; ++dst) {
    next[dst] = rows.compact_offsets[dst * (world + 1) + source];
  }
  std::vector<std::int64_t> last_token(world, -1);
  std::vector<std::int32_t> dst_row(ids.size(), -1);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == config.num_experts) continue;
    const std::int32_t dst = config.rank_of_expert(ids[i]);
    const std::int64_t token = static_cast<std::int64_t>(i) / topk;
    if (last_token[dst] != token) ++next[dst];
    last_token[dst] = token;
    dst_row[i] = next[dst] - 1;
  }
  return dst_row;
}

}  // namespace

void detail::check_matrix(const ConstTensorView& view, std::int64_t rows, std::int64_t columns,
                          DType dtype, const char* who, const char* name, std::int64_t rank) {
  require(view.dtype == dtype, who, ": ", name, "[", rank, "] is ", view.dtype, ", expected ",
          dtype);
  require(view.shape == Shape{rows, columns}, who, ": ", name, "[", rank, "] has shape ",
          to_string(view.shape), ", expected [", rows, ", ", columns, "]");
  require(rows == 0 || columns <= 1 || view.strides[1] == 1, who, ": ", name, "[", rank,
          "]: the elements of a row are ", view.strides[1], " apart, expected 1");
}

std::vector<std::int64_t> detail::read_integers(const ConstTensorView& view) {
  std::vector<std::int64_t> integers;
  const auto add = [&](std::int64_t, std::int64_t, std::int64_t value) {
    integers.push_back(value);
  };
  if (view.dtype == DType::int32) {
    visit_integers<std::int32_t>(view, add);
  } else {
    visit_integers<std::int64_t>(view, add);
  }
  return integers;
}

void detail::check_ids(const char* who, const EPConfig& config,
                       std::span<const std::vector<std::int32_t>> ids) {
  require(std::ssize(ids) == config.world_size, who, ": ids has ", ids.size(),
          " entries, expected one per rank: ", config.world_size);
  for (std::size_t r = 0; r < ids.size(); ++r) {
    const std::int64_t size = std::ssize(ids[r]);
    require(size % config.topk == 0 && size / config.topk <= config.max_tokens, who, ": ids[", r,
            "] has ", size, " entries, expected topk = ", config.topk, " for each of at most ",
            config.max_tokens, " tokens");
    for (std::int64_t i = 0; i < size; ++i) {
      require(0 <= ids[r][i] && ids[r][i] <= config.num_experts, who, ": ids[", r, "]: token ",
              i / config.topk, ", topk slot ", i % config.topk, " has expert ", ids[r][i],
              ", expected 0..", config.num_experts);
    }
  }
}

std::vector<std::int32_t> read_expert_ids(const EPConfig& config, const EPDispatchOptions& options,
                                          const ConstTensorView& ids, const char* who) {
  require(ids.ndim() == 2 && ids.shape[1] == config.topk && ids.shape[0] >= 0, who,
          ": exp_indices has shape ", to_string(ids.shape), ", expected [num_tokens, ", config.topk,
          "]");
  require(ids.shape[0] <= config.max_tokens, who, ": exp_indices has ", ids.shape[0],
          " tokens, expected at most max_tokens = ", config.max_tokens);
  if (ids.dtype == DType::int32) return read_ids<std::int32_t>(config, options, ids, who);
  if (ids.dtype == DType::int64) return read_ids<std::int64_t>(config, options, ids, who);
  throw_invalid(who, ": exp_indices is ", ids.dtype, ", expected int32 or int64");
}

std::vector<std::int32_t> count_topk_slots(const EPConfig& config,
                                           std::span<const std::int32_t> ids) {
  std::vector<std::int32_t> counts(num_counts(config));
  const std::int64_t topk = config.topk;
  const auto tokens = static_cast<std::int64_t>(ids.size()) / topk;
  std::vector<std::int64_t> last_token(config.world_size, -1);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < topk; ++k) {
      const std::int32_t expert = ids[t * topk + k];
      ++counts[expert];
      if (expert == config.num_experts) continue;
      const std::int32_t rank = config.rank_of_expert(expert);
      if (last_token[rank] == t) continue;
      last_token[rank] = t;
      ++counts[config.num_experts + 1 + rank];
    }
  }
  return counts;
}

EvenExpertsOptions copy_options(const EPConfig& config, const EPDispatchOptions& options) {
  return {.spare_experts = options.spare_experts,
          .min_rows = options.min_rows,
          .limit = options.limit,
          .alignment = options.expert_alignment,
          .num_nodes = config.num_nodes()};
}

ExpertSlots plan_slots(const EPConfig& config, const EPDispatchOptions& options,
                       std::span<const std::span<const std::int32_t>> counts,
                       std::span<const std::int32_t> present) {
  ExpertSlots slots;
  for (const auto record : counts) {
    slots.rows.insert(slots.rows.end(), record.begin(), record.begin() + config.num_experts);
  }
  EvenExpertsOptions copies = copy_options(config, options);
  copies.present = present;
  slots.plan = even_experts(slots.rows, config.world_size, config.num_experts, copies);
  return slots;
}

ExpertSlots take_slots(const EPConfig& config, const EPDispatchOptions& options,
                       std::span<const std::int32_t> present,
                       std::span<std::vector<std::int32_t>> ids) {
  std::vector<std::vector<std::int32_t>> counts;
  for (const auto& of_rank : ids) counts.push_back(count_topk_slots(config, of_rank));
  const std::vector<std::span<const std::int32_t>> records(counts.begin(), counts.end());
  ExpertSlots slots = plan_slots(config, options, records, present);
  for (std::int32_t src = 0; src < config.world_size; ++src) {
    ids[src] = slot_ids(slots.plan, slots.rows, ids[src], src);
  }
  return slots;
}

ExpertRows locate_rows(const EPConfig& config, const EPDispatchOptions& options,
                       std::span<const std::span<const std::int32_t>> counts) {
  const std::int64_t world = config.world_size;
  const std::int64_t experts = config.num_experts_per_rank();
  const std::int64_t bins = config.num_experts + 1;
  ExpertRows rows;
  rows.splits.reserve(world * bins);
  for (std::int64_t src = 0; src < world; ++src) {
    const auto record = counts[src];
    rows.splits.insert(rows.splits.end(), record.begin(), record.begin() + bins);
    rows.rank_tokens.insert(rows.rank_tokens.end(), record.begin() + bins, record.end());
    std::int64_t topk_slots = 0;
    for (std::int64_t e = 0; e < bins; ++e) topk_slots += record[e];
    if (topk_slots % config.topk != 0) {
      throw InternalError(concat("locate_rows: rank ", src, " has ", topk_slots,
                                 " topk slots, expected a multiple of topk = ", config.topk));
    }
    rows.num_input_tokens.push_back(static_cast<std::int32_t>(topk_slots / config.topk));
  }
  rows.segment_offsets.resize(world * experts * world);
  rows.expert_counts.resize(world * experts);
  rows.expert_offsets.resize(world * (experts + 1));
  rows.compact_offsets.resize(world * (world + 1));
  rows.num_recv_rows.resize(world);
  for (std::int32_t dst = 0; dst < world; ++dst) locate_segments(config, options, dst, rows);
  rows.largest_recv_rows = *std::ranges::max_element(rows.num_recv_rows);
  return rows;
}

ExpertRows locate_rows(const EPConfig& config, const EPDispatchOptions& options,
                       std::span<const std::int32_t> counts) {
  const std::size_t count = num_counts(config);
  std::vector<std::span<const std::int32_t>> by_rank;
  for (std::int32_t src = 0; src < config.world_size; ++src)
    by_rank.push_back(counts.subspan(src * count, count));
  return locate_rows(config, options, by_rank);
}

std::vector<std::int32_t> place_topk_slots(const EPConfig& config, const EPDispatchOptions& options,
                                           const ExpertRows& rows, std::int32_t source,
                                           std::span<const std::int32_t> ids) {
  return options.rows == EPRows::grouped ? place_grouped(config, rows, source, ids)
                                         : place_compact(config, rows, source, ids);
}

std::vector<std::int32_t> place_by_scatter_indices(const EPConfig& config, const ExpertRows& rows,
                                                   std::int32_t source,
                                                   std::span<const std::int32_t> ids,
                                                   std::span<const std::int64_t> positions,
                                                   const char* who) {
  std::vector<std::int64_t> first(config.world_size + 1);
  std::partial_sum(rows.num_recv_rows.begin(), rows.num_recv_rows.end(), first.begin() + 1,
                   [](std::int64_t sum, std::int32_t count) { return sum + count; });
  std::vector<std::int32_t> dst_row(ids.size(), -1);
  std::unordered_set<std::int64_t> used;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == config.num_experts) continue;
    const std::size_t dst = config.rank_of_expert(ids[i]);
    const std::int64_t position = positions[i];
    const auto token = static_cast<std::int64_t>(i) / config.topk;
    const auto topk_slot = static_cast<std::int64_t>(i) % config.topk;
    require(first[dst] <= position && position < first[dst + 1], who,
            ": full_scatter_indices of rank ", source, ", token ", token, ", topk slot ", topk_slot,
            " = ", position, ", expected ", first[dst], "..", first[dst + 1] - 1, ", the rows of ",
            "rank ", dst, " where expert ", ids[i], " lives");
    require(used.insert(position).second, who, ": full_scatter_indices of rank ", source,
            ", token ", token, ", topk slot ", topk_slot, " = ", position,
            ", which is taken already");
    dst_row[i] = static_cast<std::int32_t>(position - first[dst]);
  }
  return dst_row;
}

std::vector<std::int32_t> canonical_scatter_indices(
    const EPConfig& config, std::span<const std::vector<std::int32_t>> ids) {
  std::vector<std::int32_t> next(config.num_experts + 2);
  for (const auto& of_rank : ids) {
    for (const std::int32_t id : of_rank) ++next[id + 1];
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<std::int32_t> positions;
  for (const auto& of_rank : ids) {
    for (const std::int32_t id : of_rank) positions.push_back(next[id]++);
  }
  return positions;
}

std::vector<std::int32_t> node_send_requests(const EPConfig& config, std::int32_t source,
                                             std::span<const std::int32_t> ids) {
  constexpr std::int64_t tile_tokens = 256;
  const std::int64_t max_runs = config.max_tokens;
  const std::int64_t topk = config.topk;
  const auto tokens = static_cast<std::int64_t>(ids.size()) / topk;
  const std::int32_t experts_per_node = config.num_experts_per_rank() * config.local_world_size;
  std::vector<std::int32_t> result(std::int64_t{config.num_nodes()} * 2 * max_runs, -1);
  for (std::int32_t node = 0; node < config.num_nodes(); ++node) {
    if (node == source / config.local_world_size) continue;
    const auto starts = result.begin() + std::int64_t{node} * 2 * max_runs;
    const auto needed = [&](std::int64_t t) {
      const auto topk_slots = ids.subspan(t * topk, topk);
      return std::ranges::any_of(topk_slots,
                                 [&](std::int32_t id) { return id / experts_per_node == node; });
    };
    std::int64_t slot = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (t % tile_tokens == 0) slot = t;
      if (!needed(t)) continue;
      starts[slot] = static_cast<std::int32_t>(t);
      const std::int64_t tile_end = std::min(tokens, (t / tile_tokens + 1) * tile_tokens);
      while (t + 1 < tile_end && needed(t + 1)) ++t;
      starts[max_runs + slot] = static_cast<std::int32_t>(t + 1);
      ++slot;
    }
  }
  return result;
}

}  // namespace waybill
