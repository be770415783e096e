#pragma once

#include <span>

#include "waybill/runtime/sequence_dispatcher.h"
#include "waybill/runtime/world.h"
#include "workload.h"

namespace waybill::bench {

/// Microseconds of the slowest rank.
struct CallTimes {
  double median_us = 0;   ///< of single calls, from event to event
  double graph_us = 0;    ///< a call, of many replayed in a graph; 0: not measured
  double compile_us = 0;  ///< plan_dispatch on the host, in kept memory, upload queued
};

struct MeasureOptions {
  SequenceDispatcherOptions dispatcher;
  int warmup = 10;
  int calls = 60;
  bool graph = false;
};

/// On one rank of a world of GPUs: runs a workload, checks what arrives and times this rank.
/// Collective. @throws InternalError when it is wrong
[[nodiscard]] CallTimes measure_rank(World& world, const Workload& workload,
                                     const MeasureOptions& options);

/// The largest of each.
[[nodiscard]] CallTimes slowest(std::span<const CallTimes> ranks);

/// Runs a workload on all GPUs of this process, one rank each unless `world_size` says more, checks
/// what arrives and times it. @throws InternalError when it is wrong
[[nodiscard]] CallTimes measure(std::int32_t world_size, const Workload& workload,
                                const MeasureOptions& options);

}  // namespace waybill::bench
