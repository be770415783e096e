#include "moe/token_routes.h"

#include <utility>

#include "core/to_size.h"

namespace waybill {

using detail::to_size;

TokenRoutes::TokenRoutes(const EPConfig& config, std::int32_t source)
    : config_(config),
      source_(source),
      last_token_(to_size(config.world_size), -1),
      last_token_of_node_(to_size(config.num_nodes()), -1) {}

TopkRoute TokenRoutes::next(std::int64_t token, std::int32_t expert) {
  const std::int32_t local = config_.local_world_size;
  last_ = first_ + token;
  TopkRoute route;
  route.rank = config_.rank_of_expert(expert);
  if (route.rank == config_.world_size) return route;
  const std::int32_t node = route.rank / local;
  route.forwarder = node * local + source_ % local;
  route.to_rank = std::exchange(last_token_[to_size(route.rank)], last_) != last_;
  if (node != source_ / local)
    route.to_node = std::exchange(last_token_of_node_[to_size(node)], last_) != last_;
  return route;
}

}  // namespace waybill
