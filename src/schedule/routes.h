#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/sequence_plan.h"
#include "waybill/core/topology.h"
#include "waybill/planner/relay.h"

namespace waybill::detail {

/// The hops of a part and what they mean for its tables. A hop brings rows to one address on
/// dst_rank: the entry's first copy there, or, where it has none, rows that the rank only passes
/// on.
struct PartRoutes {
  std::vector<RelayHop> hops;          ///< ordered: a hop stands after the one that feeds it
  std::vector<std::int32_t> home;      ///< [entries]
  std::vector<std::uint8_t> has_hops;  ///< [entries] else all copies go straight from home
  std::vector<std::int64_t> dst_row;   ///< [hops] of dst's tensor: where the first row goes
  std::vector<std::int32_t> num_destinations;  ///< [hops] of the entry on dst_rank
  std::vector<std::int32_t>
      first_destination;            ///< [hops] the first of these, counted in the entry; or -1
  std::vector<std::uint8_t> feeds;  ///< [hops] other hops stand on it
  std::vector<std::int64_t> passed_rows;  ///< [W] rows that the rank only passes on
};

/// @param rows_needed [W] of the tensors in the windows; rows that are passed on lie behind them
/// @throws InvalidArgument when the hops do not fit the metadata
[[nodiscard]] PartRoutes follow_hops(const char* who, const SparseMetadata& metadata,
                                     std::vector<RelayHop> hops,
                                     std::span<const std::int64_t> rows_needed);

/// The way that a plan takes, and the hops of each part on it.
struct ChosenWay {
  PlanLimits limits;
  bool batched = false;                     ///< else every rank is reached by load and store
  std::vector<std::vector<RelayHop>> hops;  ///< [parts]; where batched
};

[[nodiscard]] ChosenWay choose_way(const char* who, SequenceOperation operation,
                                   std::span<const SequencePart> parts,
                                   const CompileOptions& options);

/// Whether the rows of a hop come back as they are, read by its source itself: dst_rank forwards
/// them to nobody and is on the node.
[[nodiscard]] bool is_read_at_copies(const Topology& topology, const RelayHop& hop, bool feeds);

/// Whether the rows of a hop come back as they are, put by dst_rank. Else they come back as a sum.
[[nodiscard]] bool returns_rows(const Topology& topology, const RelayHop& hop, bool feeds,
                                std::int32_t num_destinations);

}  // namespace waybill::detail
