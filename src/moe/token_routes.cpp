#include "moe/token_routes.h"

#include <utility>

namespace waybill {

TokenRoutes::TokenRoutes(const EPConfig& config, std::int32_t source)
    : config_(config),
      source_(source),
      last_token_(config.world_size, -1),
      last_token_of_node_(config.num_nodes(), -1) {}

TopkRoute TokenRoutes::next(std::int64_t token, std::int32_t expert) {
  const std::int32_t local = config_.local_world_size;
  last_ = first_ + token;
  TopkRoute route;
  route.rank = config_.rank_of_expert(expert);
  if (route.rank == config_.world_size) return route;
  const std::int32_t node = route.rank / local;
  route.forwarder = node * local + source_ % local;
  route.to_rank = std::exchange(last_token_[route.rank], last_) != last_;
  if (node != source_ / local)
    route.to_node = std::exchange(last_token_of_node_[node], last_) != last_;
  return route;
}

}  // namespace waybill
