#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/core/topology.h"
#include "waybill/planner/relay.h"
#include "waybill/routing/sparse_metadata.h"

namespace waybill {

/// How rows with several destinations cross between nodes once. `shard` of a hop counts the entries
/// of the metadata.
///
/// To ranks of the home's node, and to a node of which one rank alone needs the rows, they go
/// straight. To another node of which several ranks need them they go once, to the rank with the
/// home's local index, which forwards them over NVLink; it may be one that does not need them
/// itself and passes them on. Entries without a destination in another node have no hops.
/// @param row_bytes of all tensors that go this way, for `links`: all traffic of the metadata, also
///   that of entries without hops
/// @param once false: the same entries, straight from home to every rank
/// @throws InvalidArgument for a topology whose check() does or of another world size
[[nodiscard]] RelaySchedule route_over_nodes(const SparseMetadata& metadata,
                                             const Topology& topology, std::int64_t row_bytes,
                                             bool once = true);

/// Bytes per rank and link when every copy goes straight from home. [W]
[[nodiscard]] std::vector<LinkBytes> direct_links(const SparseMetadata& metadata,
                                                  const Topology& topology, std::int64_t row_bytes);

/// Adds what a hop costs its ranks.
void add_hop(std::span<LinkBytes> links, const Topology& topology, std::int32_t src_rank,
             std::int32_t dst_rank, std::int64_t num_bytes);

/// The least time in which these bytes can cross: of all ranks and both directions the largest,
/// NVLink and network apart.
[[nodiscard]] double limit_seconds(std::span<const LinkBytes> links, double nvlink_bytes_per_second,
                                   double network_bytes_per_second);

}  // namespace waybill
