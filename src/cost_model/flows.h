#pragma once

#include <cstdint>
#include <vector>

#include "moves.h"
#include "waybill/planner/relay.h"

namespace waybill::detail {

/// Bytes from one rank to another, forward. A flow with `after` forwards what that flow, which
/// stands before it, brings.
struct Flow {
  std::int32_t src = 0;
  std::int32_t dst = 0;
  std::int32_t after = -1;
  std::int64_t bytes = 0;
  std::int64_t sum_bytes = 0;  ///< of these, what comes back as sums of gradients
};

/// Peers of one rank by kind of link.
struct LinkPeers {
  std::int32_t nvlink_in = 0;
  std::int32_t nvlink_out = 0;
  std::int32_t network_in = 0;
  std::int32_t network_out = 0;
};

/// What crosses in a phase, forward, with its sums. Backward in and out change places.
struct FlowSet {
  std::vector<Flow> flows;
  std::vector<LinkBytes> links;  ///< [W]
  std::vector<LinkPeers> peers;  ///< [W] distinct ones

  /// Sums of `flows`.
  void count(const Topology& nodes);
};

/// Rows of Q; once per pair of ranks.
[[nodiscard]] std::vector<Flow> q_flows(const TimedPlan& timed, std::int64_t row_bytes);

/// What comes back along flows of KV: sums are `width` times as wide.
[[nodiscard]] std::vector<Flow> gradient_flows(std::vector<Flow> flows, std::int64_t width);

/// Rows of KV; once per pair of ranks and feeder, or once per hop.
[[nodiscard]] std::vector<Flow> kv_flows(const TimedPlan& timed, const Topology& nodes,
                                         TransferMode transfer, std::int64_t row_bytes);

}  // namespace waybill::detail
