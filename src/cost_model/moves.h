#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "waybill/core/topology.h"
#include "waybill/cost_model/step_options.h"
#include "waybill/planner/relay.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::detail {

/// Rows of a KV shard that cross from one rank to another, forward.
struct KvMove {
  std::int32_t shard = 0;
  std::int32_t src = 0;
  std::int32_t dst = 0;
  std::int32_t via = -1;  ///< the rank that brought them to src; -1: src is home
  std::int64_t rows = 0;
  bool is_fed_on = false;  ///< dst forwards them: their gradients come back as one sum
};

/// Width of a sum of gradients on its way over that of a row: it is float32, or float64.
[[nodiscard]] std::int64_t sum_width(const ModelShape& model);

/// A plan with what every prediction of it needs.
struct TimedPlan {
  const QkvPlan* plan = nullptr;
  const RelaySchedule* relay = nullptr;
  QkvRouting routing;
  std::vector<std::int32_t> home;      ///< [N]
  std::vector<std::int32_t> document;  ///< [N]
  std::vector<std::int64_t> position;  ///< [N] first token, in the document
};

/// Calls `visit` for every move of KV between ranks, straight or once per node.
void visit_kv_moves(const TimedPlan& timed, const Topology& nodes, TransferMode transfer,
                    const std::function<void(const KvMove&)>& visit);

/// [N] (query, key) pairs of each shard: by the mask's window; without one as the plan says. With
/// what rows and shards take of the kernel beside them.
[[nodiscard]] std::vector<std::int64_t> work_of_shards(const TimedPlan& timed,
                                                       const AttentionMask& mask,
                                                       const HardwareFacts& facts);

}  // namespace waybill::detail
