#pragma once

#include <cstdint>
#include <vector>

#include "waybill/moe/ep_config.h"

namespace waybill {

/// The way of one topk slot of a token in a dispatch, after the earlier topk slots of the same
/// token.
struct TopkRoute {
  std::int32_t rank = 0;  ///< of its expert; world_size: dropped, the rest has no meaning
  /// The rank of the source's local index on that rank's node, which hands the token on there; the
  /// source itself on its own node.
  std::int32_t forwarder = 0;
  bool to_node =
      false;  ///< the source hands the token to the forwarder: the first topk slot on that node
  bool to_rank = false;  ///< the forwarder hands it to the rank: the first topk slot there
};

/// The ways of one source rank's tokens: a token goes once to each rank, and between nodes once to
/// each node.
class TokenRoutes {
 public:
  /// @param config checked
  TokenRoutes(const EPConfig& config, std::int32_t source);

  /// @param token not smaller than the one before
  /// @param expert of read_expert_ids
  [[nodiscard]] TopkRoute next(std::int64_t token, std::int32_t expert);

  /// The tokens of another source are next. What a constructor would clear, a number a rank, stays.
  void begin(std::int32_t source) {
    source_ = source;
    first_ = last_ + 1;
  }

 private:
  EPConfig config_;
  std::int32_t source_;
  std::int64_t first_ = 0;  ///< number of the source's token 0 among those of all sources
  std::int64_t last_ = -1;  ///< of the last token
  std::vector<std::int64_t> last_token_;          ///< [W] number that went to a rank; -1
  std::vector<std::int64_t> last_token_of_node_;  ///< [N]
};

}  // namespace waybill
