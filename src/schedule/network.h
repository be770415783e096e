#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "batches.h"
#include "routes.h"
#include "schedule/sequence_plan.h"
#include "waybill/core/topology.h"

namespace waybill::detail {

/// Bytes of own rows that each rank puts on other nodes: its stage has room for them. [W]
[[nodiscard]] std::vector<std::int64_t> staged_bytes(std::span<const SequencePart> parts,
                                                     std::span<const PartRoutes> routes,
                                                     const Topology& topology);

/// Takes all that goes to other nodes out of the batches of `plan`, a whole plan without chunks,
/// and writes it into `plan.network`. Rows of the rank's tensors are sent to its stage first,
/// `stage_begin` bytes after the begin of its window, such that rows that are adjacent at the
/// receiver are so in the stage; rows of the window are put from where they are. Rows for which
/// nobody waits go network first, in batches of about `batch_bytes`.
void split_network(SequencePlan& plan, const Topology& topology, std::int64_t stage_begin,
                   std::int64_t batch_bytes);

/// The phases of `rank` in a call whose plans, with split networks, are `plans`. [W]
///
/// A phase has a level and a part of it. The level of a step is the number of crossings that come
/// before it one after another, where a batch also comes after the earlier batches of its rank: so
/// when the phases of lower levels are done on all ranks, the waits of a level end, whatever the
/// number of workers on the batches (docs/decisions/nodes.md). Parts of a level are for
/// pipelining: each takes about `phase_bytes` of each rank's steps.
[[nodiscard]] std::vector<NetworkPhase> network_phases(std::span<const SequencePlan* const> plans,
                                                       const Topology& topology, Rank rank,
                                                       std::int64_t phase_bytes);

}  // namespace waybill::detail
