#pragma once

#include <cstdint>

#include "waybill/core/topology.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/planner/planner_options.h"

namespace waybill {

/// The cost of a call for a rank besides its rows, as it grows with the ranks: the signals that it
/// has come, its fingerprint of the call, and for experts the counts by which all place rows.
struct CallOverhead {
  std::int64_t node_messages = 0;     ///< to the other ranks of its node
  std::int64_t network_messages = 0;  ///< to the ranks of other nodes
  std::int64_t bytes_out = 0;         ///< to all of them
  std::int64_t memory_bytes = 0;      ///< that it keeps for what the others tell
  double seconds = 0;                 ///< the longer of node and network

  friend bool operator==(const CallOverhead&, const CallOverhead&) = default;
};

/// The cost of a dispatch or a gradient of sequences, of a combine, or of a dispatch of experts by
/// a known routing. Messages of a node take HardwareFacts::message_seconds each; those to others
/// StepCosts::network_post_seconds each, and the last StepCosts::network_message_seconds to arrive.
/// @throws InvalidArgument as topology.check() and for speeds that are not above 0
[[nodiscard]] CallOverhead call_overhead(const Topology& topology,
                                         const HardwareFacts& hardware = {},
                                         const StepCosts& costs = {});

/// The cost of a dispatch of experts that counts: every rank sends every other one its numbers of
/// tokens for each expert and rank, in words of 8 bytes.
/// @throws InvalidArgument as above, and unless num_experts is a multiple of the ranks
[[nodiscard]] CallOverhead counting_overhead(const Topology& topology, std::int32_t num_experts,
                                             const HardwareFacts& hardware = {},
                                             const StepCosts& costs = {});

}  // namespace waybill
