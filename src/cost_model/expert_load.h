#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/moe/ep_config.h"

namespace waybill::detail {

/// Rows over a rank's links.
struct ExpertLinkRows {
  std::int64_t nvlink_in = 0;
  std::int64_t nvlink_out = 0;
  std::int64_t network_in = 0;
  std::int64_t network_out = 0;
};

/// What a rank has to do with a dispatch, in rows. A combine moves the same ones the other way.
struct ExpertRankLoad {
  std::int64_t tokens = 0;
  std::int64_t computed = 0;    ///< topk slots of its experts
  std::int64_t received = 0;    ///< tokens, its own among them
  std::int64_t kept = 0;        ///< of these, those that it has as their home or forwarder
  std::int64_t kept_slots = 0;  ///< their topk slots
  ExpertLinkRows per_node;      ///< a row for each node, then for each rank
  ExpertLinkRows slots;         ///< a row for each node, inside it for each topk slot
  ExpertLinkRows straight;      ///< a row for each rank, wherever it is
  /// Of what it has from other nodes: rows that it hands on, that it keeps.
  std::int64_t forwarded = 0;
  std::int64_t forwarded_slots = 0;
  std::int64_t kept_of_others = 0;
  std::int64_t computed_of_others = 0;  ///< topk slots of its experts, of tokens of other nodes
  std::int64_t puts_out = 0;            ///< of a dispatch, per node
  std::int64_t puts_back = 0;           ///< of a combine: sums of other nodes' tokens
  std::int64_t runs_out = 0;            ///< of a low latency dispatch: adjacent tokens for a rank
  std::int64_t runs_back = 0;
};

/// Counts them. @param ids as predict_experts has them, checked
[[nodiscard]] std::vector<ExpertRankLoad> count_expert_load(
    const EPConfig& config, const EPDispatchOptions& dispatch,
    std::span<const std::vector<std::int32_t>> ids);

}  // namespace waybill::detail
