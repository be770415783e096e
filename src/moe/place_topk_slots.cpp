#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "waybill/core/error.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {

namespace {

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

}  // namespace waybill
