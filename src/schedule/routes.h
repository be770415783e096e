#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/sequence_plan.h"
#include "waybill/core/topology.h"
#include "waybill/planner/planner.h"

namespace waybill::detail {

/// Sums of rows and bytes of a call stay below it, with room for sums that are wider.
inline constexpr double max_call_bytes = 0x1p60;

/// The hops of a part and what they mean for its tables. A hop brings rows to one address on
/// dst_rank: the entry's first copy there, or, where it has none, rows that the rank only passes
/// on.
struct PartRoutes {
  std::vector<RelayHop> hops;           ///< ordered: a hop stands after the one that feeds it
  std::vector<std::int32_t> home;       ///< [entries]
  std::vector<std::uint8_t> has_hops;   ///< [entries] else all copies go straight from home
  std::vector<std::int64_t> receivers;  ///< [entries] ranks with copies but home; 0 without
                                        ///< hops
  std::vector<std::uint8_t> feeds;      ///< [hops] other hops stand on it
  std::vector<std::int32_t> num_destinations;  ///< [hops] of the entry on dst_rank
  std::vector<std::int32_t>
      first_destination;              ///< [hops] the first of these, counted in the entry; or -1
  std::vector<std::int64_t> dst_row;  ///< [hops] of dst's tensor: where the first row goes
  std::vector<std::int64_t> passed_rows;  ///< [W] rows that the rank only passes on
};

/// @param rows_needed [W] of the tensors in the windows; rows that are passed on follow them
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

/// How the rows that a hop has brought come back along it.
enum class ReturnKind : std::uint8_t {
  read,  ///< the hop's source reads the copies itself: dst_rank is on the node and forwards nothing
  rows,  ///< the only copy, put as it is by dst_rank
  sum,   ///< one sum of all that the destination has and gets back
};

/// @param h a hop of the routes
[[nodiscard]] ReturnKind return_kind(const Topology& topology, const PartRoutes& routes,
                                     std::size_t h);

}  // namespace waybill::detail
