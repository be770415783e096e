#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "routes.h"
#include "schedule/sequence_plan.h"
#include "waybill/core/topology.h"

namespace waybill::detail {

/// Bytes of own rows that each rank puts on other nodes: what its stage has room for. [W]
[[nodiscard]] std::vector<std::int64_t> staged_bytes(std::span<const SequencePart> parts,
                                                     std::span<const PartRoutes> routes,
                                                     const Topology& topology);

/// Takes all that goes to other nodes out of the batches of `plan`, a whole plan without chunks,
/// and writes it into `plan.network`. Rows of the rank's tensors are sent to its stage first,
/// `stage_begin` bytes behind the begin of its window, such that what is adjacent at the receiver
/// is so in the stage; rows of the window are put from where they are. Rows for which nobody waits
/// go network first, in batches of about `batch_bytes`.
void split_network(SequencePlan& plan, const Topology& topology, std::int64_t stage_begin,
                   std::int64_t batch_bytes);

}  // namespace waybill::detail
