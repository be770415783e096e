#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "planner/node_routes.h"
#include "waybill/core/topology.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::detail {

/// The link that a resource is; null: it is none.
[[nodiscard]] inline const LinkField* link_of(StepResource resource) {
  const int idx = static_cast<int>(resource) - static_cast<int>(StepResource::nvlink_in);
  return idx < 0 ? nullptr : &link_fields[idx];
}

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
  /// [N] 1: attended to where it is, while other rows travel; empty: the kernel waits for all rows
  std::vector<std::uint8_t> stays = {};
};

/// Calls `visit` for every move of KV between ranks, straight or once per node.
void visit_kv_moves(const TimedPlan& timed, const Topology& nodes, TransferMode transfer,
                    const std::function<void(const KvMove&)>& visit);

/// [N] (query, key) pairs of each shard that the mask shows in the plan's range. The time that the
/// kernel takes per row and shard is in them, as pairs.
[[nodiscard]] std::vector<std::int64_t> work_of_shards(const TimedPlan& timed,
                                                       const AttentionMask& mask,
                                                       const HardwareFacts& facts);

/// Bytes from one rank to another, forward. A flow with `after` forwards what that flow, which
/// stands before it, brings.
struct Flow {
  std::int32_t src = 0;
  std::int32_t dst = 0;
  std::int32_t after = -1;
  std::int64_t bytes = 0;
  std::int64_t sum_bytes = 0;  ///< the part of these that comes back as sums of gradients
};

/// The flows of a phase, forward, with their sums. Backward in and out change places.
struct FlowSet {
  std::vector<Flow> flows;
  std::vector<LinkBytes> links;  ///< [W]
  std::vector<LinkBytes> peers;  ///< [W] number of distinct peers over each link

  /// Sums of `flows`.
  void count(const Topology& nodes);
};

/// Rows that go straight; once per pair of ranks.
[[nodiscard]] std::vector<Flow> flows_of_pairs(const RecvCounts& recv, std::int64_t row_bytes);

/// The gradients that come back along flows of KV: sums are `width` times as wide.
[[nodiscard]] std::vector<Flow> gradient_flows(std::vector<Flow> flows, std::int64_t width);

/// Rows of KV; once per pair of ranks and feeder, or once per hop.
[[nodiscard]] std::vector<Flow> kv_flows(const TimedPlan& timed, const Topology& nodes,
                                         TransferMode transfer, std::int64_t row_bytes);

/// The flows of the three kinds of phases.
struct StepFlows {
  FlowSet dispatch;  ///< Q, K, V
  FlowSet q;         ///< rows like Q
  FlowSet gradient;  ///< dK and dV
};

/// Whether rows move home, against the flows.
[[nodiscard]] inline bool is_reverse(StepPhase phase) {
  return phase == StepPhase::output || phase == StepPhase::q_gradient ||
         phase == StepPhase::kv_gradient;
}

/// Runs one phase in which rows move: fills `phase` (all but the document of `slowest`), whose
/// `begin` and `phase` are set.
/// @param reverse the flows cross the other way
/// @param nvlink_share speed over that of a push
void run_transfer(const FlowSet& set, bool reverse, double nvlink_share, const Topology& nodes,
                  const StepOptions& options, PhasePrediction& phase);

/// Runs the phases of a step whose options, world size and work are set.
/// @param gradient_share as nvlink_share, of the gradients of K and V
/// @param even as if every rank had the mean of the work
/// @param staying [W] pairs that are attended to while rows travel; empty: none
void run_phases(const StepFlows& flows, const Topology& nodes, double gradient_share, bool even,
                std::span<const std::int64_t> staying, StepPrediction& step);

/// When the last rank has ended it.
[[nodiscard]] double end_of(const PhasePrediction& phase);

/// Sets the times of a step whose phases have run, and the path: the causes for which the last rank
/// waited, phase by phase, without amounts and documents.
void sum_up(StepPrediction& step);

}  // namespace waybill::detail
