#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "waybill/moe/ep_config.h"

namespace waybill {

/// The route of one topk slot in a dispatch, given the earlier topk slots of the same token.
struct TopkRoute {
  std::int32_t rank = 0;  ///< rank of its expert; world_size: dropped, the rest has no meaning
  /// The rank of the source's local index on that rank's node, which hands the token on there; the
  /// source itself on its own node.
  std::int32_t forwarder = 0;
  bool to_node =
      false;  ///< the source hands the token to the forwarder: the first topk slot on that node
  bool to_rank = false;  ///< the forwarder hands it to the rank: the first topk slot there
};

/// The routes of one source rank's tokens: a token goes once to each rank, and between nodes once
/// to each node.
class TokenRoutes {
 public:
  /// @param config checked
  TokenRoutes(const EPConfig& config, std::int32_t source)
      : config_(config),
        source_(source),
        last_token_(config.world_size, -1),
        last_token_of_node_(config.num_nodes(), -1) {}

  /// @param token not smaller than the one before
  /// @param expert as read_expert_ids gives it
  [[nodiscard]] TopkRoute next(std::int64_t token, std::int32_t expert) {
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

  /// The tokens of another source are next. What a constructor would clear, a number a rank, stays.
  void begin(std::int32_t source) {
    source_ = source;
    first_ = last_ + 1;
  }

 private:
  EPConfig config_;
  std::int32_t source_;
  std::int64_t first_ = 0;  ///< number of the source's token 0 among those of all sources
  std::int64_t last_ = -1;  ///< number of the last token
  std::vector<std::int64_t> last_token_;          ///< [W] number that went to a rank; -1
  std::vector<std::int64_t> last_token_of_node_;  ///< [N]
};

}  // namespace waybill
