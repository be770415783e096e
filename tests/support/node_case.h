#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "planner/node_routes.h"
#include "support/random_relay.h"
#include "support/sequence_step.h"
#include "support/sum_order.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::test {

/// A case on logical nodes, with a relay or without, and what must come out.
struct NodeCase {
  NodeCase(SequenceCase sequence, Topology on, RelaySchedule schedule, std::uint64_t seed = 1)
      : sample(std::move(sequence)),
        topology(on),
        relay(std::move(schedule)),
        expected(sample, seed) {
    const SparseMetadata& kv_metadata = sample.routing.fwd_kv;
    const std::int64_t row_bytes = sample.k.row_bytes() + sample.v.row_bytes();
    std::vector<RelayHop> hops = relay.hops;
    // Entries of which the schedule says nothing go as they do without it.
    const PlanLimits limits = compile_kv_gradient(kv(), Rank{0}, gradient_options()).limits;
    once = limits.once_per_node_seconds < limits.direct_seconds;
    std::vector<RelayHop> others;
    if (topology.num_nodes() > 1)
      others = route_over_nodes(kv_metadata, topology, row_bytes, once).hops;
    std::vector<std::int32_t> moved(others.size(), -1);
    for (std::size_t h = 0; h < others.size(); ++h) {
      const auto same = [&](const RelayHop& hop) { return hop.shard == others[h].shard; };
      if (std::ranges::any_of(relay.hops, same)) continue;
      moved[h] = static_cast<std::int32_t>(hops.size());
      hops.push_back(others[h]);
      if (others[h].after >= 0) hops.back().after = moved[others[h].after];
    }
    const SumOrder order(kv_metadata, hops, topology);
    expected.k_gradient = order.sums(expected.k_out, sample.k.dtype);
    expected.v_gradient = order.sums(expected.v_out, sample.v.dtype);
  }

  [[nodiscard]] const RelaySchedule* schedule() const { return relay.empty() ? nullptr : &relay; }
  [[nodiscard]] std::vector<SequencePart> forward() const {
    return {{&sample.routing.fwd_q, {sample.q}},
            {&sample.routing.fwd_kv, {sample.k, sample.v}, schedule()}};
  }
  [[nodiscard]] std::vector<SequencePart> kv() const {
    return {{&sample.routing.fwd_kv, {sample.k, sample.v}, schedule()}};
  }
  [[nodiscard]] std::vector<SequencePart> reverse() const {
    return {{&sample.routing.rev_q, {sample.q}}};
  }
  [[nodiscard]] StepParts parts() const { return {forward(), reverse(), kv()}; }

  [[nodiscard]] CompileOptions gradient_options() const {
    return {.plan = {.relay = RelayUse::always}, .ranks_per_node = topology.ranks_per_node};
  }

  SequenceCase sample;
  Topology topology;
  RelaySchedule relay;
  Expected expected;
  bool once = false;  ///< sums are made in nodes where no schedule says how
};

inline void check_step(World& world, SequenceDispatcher& dispatcher, const NodeCase& node) {
  check_step(world, dispatcher, node.sample, node.parts(), node.expected);
}

/// Small batches, so that there are many; relays wherever there are schedules.
inline SequenceDispatcherOptions eager_options() {
  SequenceDispatcherOptions options;
  options.plan.relay = RelayUse::always;
  options.plan.batch_bytes = 256;
  options.plan.chunk_bytes = 64;
  return options;
}

/// The cases of sequence_cases on nodes: every other one with a random relay.
inline std::vector<std::unique_ptr<NodeCase>> node_cases(Topology topology, int num_random,
                                                         std::int64_t scale = 1) {
  std::vector<std::unique_ptr<NodeCase>> cases;
  std::uint64_t seed = 7;
  for (SequenceCase& sample : sequence_cases(topology.world_size, num_random, scale)) {
    RelaySchedule relay;
    if (++seed % 2 == 0 || topology.num_nodes() == 1)
      relay = random_relay(sample.routing.fwd_kv, seed);
    cases.push_back(
        std::make_unique<NodeCase>(std::move(sample), topology, std::move(relay), seed));
  }
  return cases;
}

}  // namespace waybill::test
