#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// The phases of `rank` in a call whose plans, with split networks, are `plans`. [W]
///
/// A phase has a level and a part of it. The level of a step is the number of crossings that one
/// behind the other come before it, where a batch also comes behind the batches in front of it: so
/// when the phases of lower levels are done on all ranks, the waits of a level end, whatever the
/// number of workers on the batches (docs/decisions/nccl_backend.md). Parts of a level are for
/// pipelining: of each rank's steps in turn about `phase_bytes`.
[[nodiscard]] std::vector<NetworkPhase> network_phases(std::span<const SequencePlan* const> plans,
                                                       const Topology& topology, Rank rank,
                                                       std::int64_t phase_bytes);

}  // namespace waybill::detail
