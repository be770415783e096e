#include <span>

#include "layout_desc.h"
#include "moe/token_routes.h"

namespace waybill::detail {
namespace {

/// Counts one source's tokens.
void count_tokens(const EPConfig& config, std::int32_t source, std::span<const std::int32_t> ids,
                  ExpertTraffic& traffic) {
  const auto pair = [&](std::int64_t from, std::int64_t to) {
    return from * config.world_size + to;
  };
  TokenRoutes routes(config, source);
  for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
    const TopkRoute route = routes.next(i / config.topk, ids[i]);
    if (route.rank == config.world_size) continue;
    ++traffic.rows_per_rank_pair.i64()[pair(source, route.rank)];
    if (route.to_node) {
      const std::int32_t node = route.forwarder / config.local_world_size;
      ++traffic.inter_node_tokens.i64()[std::int64_t{source} * config.num_nodes() + node];
      ++traffic.crossings.i64()[pair(source, route.forwarder)];
    }
    if (!route.to_rank) continue;
    ++traffic.unique_tokens_per_rank_pair.i64()[pair(source, route.rank)];
    if (route.rank != route.forwarder) ++traffic.crossings.i64()[pair(route.forwarder, route.rank)];
  }
}

}  // namespace

void fill_traffic(ExpertDispatch& dispatch) {
  const EPConfig& config = dispatch.config;
  const Shape pairs{config.world_size, config.world_size};
  const Shape nodes{config.world_size, config.num_nodes()};
  ExpertTraffic& traffic = dispatch.traffic;
  traffic = {IndexArray(pairs), IndexArray(pairs), IndexArray(nodes), IndexArray(nodes),
             IndexArray(pairs)};
  for (std::int32_t src = 0; src < config.world_size; ++src) {
    const auto& ids = dispatch.ids[src];
    count_tokens(config, src, ids, traffic);
    const auto ranges = node_send_requests(config, src, ids);
    for (std::size_t slot = 0; slot < ranges.size(); ++slot) {
      const auto plane = static_cast<std::int64_t>(slot) / config.max_tokens;
      if (plane % 2 != 0 || ranges[slot] < 0) continue;  // starts only
      ++traffic.inter_node_ranges.i64()[std::int64_t{src} * config.num_nodes() + plane / 2];
    }
  }
}

}  // namespace waybill::detail
