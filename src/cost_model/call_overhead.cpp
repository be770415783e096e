#include "waybill/cost_model/call_overhead.h"

#include <algorithm>

#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr std::int64_t word_bytes = 8;
constexpr std::int64_t words_per_call = 5;  // that it has come, and the fingerprint's four

/// @param words that go to each other rank
CallOverhead overhead_of(const Topology& topology, std::int64_t words,
                         const HardwareFacts& hardware, const StepCosts& costs) {
  topology.check();
  StepOptions{.hardware = hardware, .costs = costs}.check("call_overhead");
  const std::int64_t world = topology.world_size;
  CallOverhead result;
  result.node_messages = topology.ranks_per_node - 1;
  result.network_messages = world - topology.ranks_per_node;
  result.bytes_out = (world - 1) * words * word_bytes;
  // By parity of the call, as a fast rank may be in the next one already.
  result.memory_bytes = 2 * world * words * word_bytes;
  const auto link_seconds = [&](std::int64_t messages, double of_message, double speed) {
    return static_cast<double>(messages) *
           (of_message + static_cast<double>(words * word_bytes) / speed);
  };
  const double latency = result.network_messages > 0 ? costs.network_message_seconds : 0;
  result.seconds =
      costs.phase_seconds +
      std::max(link_seconds(result.node_messages, hardware.message_seconds,
                            hardware.nvlink_bytes_per_second),
               latency + link_seconds(result.network_messages, costs.network_post_seconds,
                                      hardware.network_bytes_per_second));
  return result;
}

}  // namespace

CallOverhead call_overhead(const Topology& topology, const HardwareFacts& hardware,
                           const StepCosts& costs) {
  return overhead_of(topology, words_per_call, hardware, costs);
}

CallOverhead counting_overhead(const Topology& topology, std::int32_t num_experts,
                               const HardwareFacts& hardware, const StepCosts& costs) {
  require(topology.world_size > 0 && num_experts > 0 && num_experts % topology.world_size == 0,
          "counting_overhead: num_experts = ", num_experts, ", expected a multiple of ",
          topology.world_size, " ranks");
  const std::int64_t counts = std::int64_t{num_experts} + 1 + topology.world_size;
  return overhead_of(topology, words_per_call + counts, hardware, costs);
}

}  // namespace waybill
