#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/gpu_step.h"
#include "support/node_case.h"

namespace waybill::test {

/// The ways of one node, without copy engines; small batches make many steps, large ones few.
inline std::vector<Way> node_ways() {
  std::vector<Way> all;
  for (const Way& way : ways(1)) {
    if (way.options.num_sms == 0) continue;
    for (const std::int64_t batch_bytes : {256, 0}) {
      Way& on_nodes = all.emplace_back(way);
      on_nodes.options.plan.relay = RelayUse::always;
      on_nodes.options.plan.batch_bytes = batch_bytes;
    }
  }
  return all;
}

inline void check_gpu_nodes(World& world, const std::vector<std::unique_ptr<NodeCase>>& cases) {
  DeviceArena arena(world);
  for (const Way& way : node_ways()) {
    SequenceDispatcher dispatcher(world, way.options);
    dispatcher.reserve(std::int64_t{64} << 20, {arena.stream()}, 1 << 12);
    for (const auto& node : cases) {
      const std::string name = concat(way.name, ", batches of ", way.options.plan.batch_bytes, ", ",
                                      node->sample.name, ", rank ", world.rank());
      check_gpu_step(world, dispatcher, arena, node->parts(), node->expected, name);
      if (testing::Test::HasFatalFailure()) return;
    }
    world.barrier();
    dispatcher.close();
  }
  world.barrier();
}

}  // namespace waybill::test
