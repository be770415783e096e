#include <algorithm>

#include "waybill/moe/expert_routing.h"

namespace waybill {

namespace {

constexpr std::int64_t tile_tokens = 256;

}  // namespace

std::vector<std::int32_t> node_send_requests(const EPConfig& config, std::int32_t source,
                                             std::span<const std::int32_t> ids) {
  const std::int64_t most = config.max_tokens;
  const std::int64_t topk = config.topk;
  const auto tokens = static_cast<std::int64_t>(ids.size()) / topk;
  const std::int32_t experts_per_node = config.num_experts_per_rank() * config.local_world_size;
  std::vector<std::int32_t> result(std::int64_t{config.num_nodes()} * 2 * most, -1);
  for (std::int32_t node = 0; node < config.num_nodes(); ++node) {
    if (node == source / config.local_world_size) continue;
    const auto starts = result.begin() + std::int64_t{node} * 2 * most;
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
      starts[most + slot] = static_cast<std::int32_t>(t + 1);
      ++slot;
    }
  }
  return result;
}

}  // namespace waybill
