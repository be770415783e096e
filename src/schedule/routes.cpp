#include <algorithm>
#include <numeric>
#include <utility>

#include "compile.h"
#include "planner/node_routes.h"
#include "routing/homes.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

/// The hops' entries and their copies; all but dst_row and passed_rows. Hops are looked at entry by
/// entry, in whatever order they stand.
/// @param hops of entries of the metadata, to ranks of its world
PartRoutes link_hops(const SparseMetadata& metadata, std::vector<std::int32_t> homes,
                     std::vector<RelayHop> hops) {
  PartRoutes routes;
  routes.home = std::move(homes);
  routes.has_hops.resize(metadata.num_entries());
  routes.receivers.resize(metadata.num_entries());
  if (hops.empty()) return routes;
  routes.feeds.resize(hops.size());
  routes.num_destinations.resize(hops.size());
  routes.first_destination.resize(hops.size());
  std::vector<std::int64_t> first_hop(metadata.num_entries() + 1);  // into by_entry
  for (const RelayHop& hop : hops) {
    routes.has_hops[hop.shard] = 1;
    if (hop.after >= 0) routes.feeds[hop.after] = 1;
    ++first_hop[hop.shard + 1];
  }
  std::partial_sum(first_hop.begin(), first_hop.end(), first_hop.begin());
  std::vector<std::size_t> by_entry(hops.size());
  std::vector<std::int64_t> fill = first_hop;
  for (std::size_t h = 0; h < hops.size(); ++h) by_entry[fill[hops[h].shard]++] = h;
  std::vector<std::int32_t> count(metadata.world_size);  // [W] copies of the entry at hand
  std::vector<std::int32_t> first(metadata.world_size, -1);
  for (std::int64_t entry = 0; entry < metadata.num_entries(); ++entry) {
    if (routes.has_hops[entry] == 0) continue;
    const std::int64_t begin = metadata.destination_begin(entry);
    for (auto c = begin; c < metadata.destination_end(entry); ++c) {
      const std::int32_t rank = metadata.dst_rank[c];
      if (count[rank]++ > 0) continue;
      first[rank] = static_cast<std::int32_t>(c - begin);
      if (rank != routes.home[entry]) ++routes.receivers[entry];
    }
    for (auto i = first_hop[entry]; i < first_hop[entry + 1]; ++i) {
      const std::size_t h = by_entry[i];
      routes.num_destinations[h] = count[hops[h].dst_rank];
      routes.first_destination[h] = first[hops[h].dst_rank];
    }
    for (auto c = begin; c < metadata.destination_end(entry); ++c) {
      count[metadata.dst_rank[c]] = 0;
      first[metadata.dst_rank[c]] = -1;
    }
  }
  routes.hops = std::move(hops);
  return routes;
}

std::int64_t sum_row_bytes_of(const SequencePart& part) {
  std::int64_t bytes = 0;
  for (const TensorFormat& format : part.tensors) bytes += sum_format(format).row_bytes();
  return bytes;
}

/// Bytes of the hops of a part and of its entries without hops. On the way back the rows that a hop
/// brought in come out, sums wider than rows.
void add_traffic(std::vector<LinkBytes>& links, const Topology& topology,
                 SequenceOperation operation, const SequencePart& part,
                 const std::vector<RelayHop>& hops) {
  const SparseMetadata& metadata = *part.metadata;
  const PartRoutes routes = link_hops(metadata, homes_of(metadata.rank_offsets), hops);
  const bool back = operation == SequenceOperation::kv_gradient;
  const std::int64_t row_bytes = row_bytes_of(part);
  const std::int64_t sum_bytes = sum_row_bytes_of(part);
  const auto add = [&](std::int32_t src, std::int32_t dst, std::int64_t bytes) {
    add_hop(links, topology, back ? dst : src, back ? src : dst, bytes);
  };
  for (std::size_t h = 0; h < hops.size(); ++h) {
    const RelayHop& hop = hops[h];
    std::int64_t bytes = row_bytes;
    if (back) {
      const ReturnKind kind = return_kind(topology, routes, h);
      if (kind == ReturnKind::read) bytes = routes.num_destinations[h] * row_bytes;
      if (kind == ReturnKind::sum) bytes = sum_bytes;
    }
    add(hop.src_rank, hop.dst_rank, hop.num_rows * bytes);
  }
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    if (routes.has_hops[j] != 0) continue;
    for (auto c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
      const std::int32_t dst = metadata.dst_rank[c];
      if (dst != routes.home[j]) add(routes.home[j], dst, metadata.seq_len[j] * row_bytes);
    }
  }
}

/// The schedule's hops, and those of `others` for entries of which it has none.
std::vector<RelayHop> completed(const SparseMetadata& metadata, const RelaySchedule& schedule,
                                const std::vector<RelayHop>& others) {
  std::vector<RelayHop> hops = schedule.hops;
  std::vector<std::uint8_t> has_hops(metadata.num_entries());
  for (const RelayHop& hop : hops) has_hops[hop.shard] = 1;
  std::vector<std::int32_t> moved(others.size(), -1);
  for (std::size_t h = 0; h < others.size(); ++h) {
    if (has_hops[others[h].shard] != 0) continue;
    moved[h] = static_cast<std::int32_t>(hops.size());
    hops.push_back(others[h]);
    if (others[h].after >= 0) hops.back().after = moved[others[h].after];
  }
  return hops;
}

void check_hop_bytes(const char* who, const SequencePart& part) {
  double rows = 0;
  for (const RelayHop& hop : part.relay->hops) rows += static_cast<double>(hop.num_rows);
  const double bytes = rows * (1 + static_cast<double>(sum_row_bytes_of(part)));
  require(bytes < max_call_bytes, who, ": the relay hops move ", bytes,
          " bytes, expected below 2^60");
}

Topology checked_topology(const char* who, std::int32_t world, const CompileOptions& options) {
  const Topology topology = options.topology(world);
  const SequencePlanOptions& plan = options.plan;
  require(options.ranks_per_node >= 0 && world % topology.ranks_per_node == 0, who,
          ": ranks_per_node = ", options.ranks_per_node,
          ", expected 0 or a divisor of world_size = ", world);
  require(plan.nvlink_bytes_per_second > 0 && plan.network_bytes_per_second > 0, who,
          ": nvlink_bytes_per_second = ", plan.nvlink_bytes_per_second,
          " and network_bytes_per_second = ", plan.network_bytes_per_second, ", expected > 0");
  require(plan.batch_bytes >= 0, who, ": batch_bytes = ", plan.batch_bytes, ", expected >= 0");
  return topology;
}

bool has_relay(const SequencePart& part) { return part.relay != nullptr && !part.relay->empty(); }

using Hops = std::vector<std::vector<RelayHop>>;  ///< [parts]

Hops hops_over_nodes(std::span<const SequencePart> parts, const Topology& topology, bool once) {
  Hops hops;
  for (const SequencePart& part : parts)
    hops.push_back(route_over_nodes(*part.metadata, topology, row_bytes_of(part), once).hops);
  return hops;
}

/// @param others for entries of which the schedules have no hops
/// @throws InvalidArgument for schedules that do not fit
Hops hops_by_schedules(const char* who, std::span<const SequencePart> parts, const Hops& others) {
  Hops hops = others;
  const std::vector<std::int64_t> no_rows(parts.front().metadata->world_size);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    if (!has_relay(parts[p])) continue;
    (void)follow_hops(who, *parts[p].metadata, parts[p].relay->hops, no_rows);
    check_hop_bytes(who, parts[p]);
    hops[p] = completed(*parts[p].metadata, *parts[p].relay, others[p]);
  }
  return hops;
}

}  // namespace

ReturnKind return_kind(const Topology& topology, const PartRoutes& routes, std::size_t h) {
  const RelayHop& hop = routes.hops[h];
  if (routes.feeds[h] != 0) return ReturnKind::sum;
  if (topology.share_node(Rank{hop.src_rank}, Rank{hop.dst_rank})) return ReturnKind::read;
  return routes.num_destinations[h] == 1 ? ReturnKind::rows : ReturnKind::sum;
}

PartRoutes follow_hops(const char* who, const SparseMetadata& metadata, std::vector<RelayHop> hops,
                       std::span<const std::int64_t> rows_needed) {
  std::vector<std::int32_t> homes = homes_of(metadata.rank_offsets);
  check_hops(who, hops, metadata.world_size, metadata.seq_len, homes);
  double total_rows = 0;
  for (const RelayHop& hop : hops) total_rows += static_cast<double>(hop.num_rows);
  require(total_rows < max_call_bytes, who, ": the relay hops move ", total_rows,
          " rows, expected below 2^60");
  PartRoutes routes = link_hops(metadata, std::move(homes), std::move(hops));
  routes.passed_rows.assign(metadata.world_size, 0);
  std::vector<std::int64_t> missing(metadata.num_entries());  // rows of receivers without a hop
  for (std::size_t j = 0; j < missing.size(); ++j)
    missing[j] = routes.receivers[j] * metadata.seq_len[j];
  for (std::size_t h = 0; h < routes.hops.size(); ++h) {
    const RelayHop& hop = routes.hops[h];
    if (routes.num_destinations[h] > 0) {
      missing[hop.shard] -= hop.num_rows;
      const auto copy = metadata.destination_begin(hop.shard) + routes.first_destination[h];
      routes.dst_row.push_back(metadata.dst_offset[copy] + hop.row_begin);
    } else {
      std::int64_t& passed = routes.passed_rows[hop.dst_rank];
      routes.dst_row.push_back(rows_needed[hop.dst_rank] + passed);
      passed += hop.num_rows;
    }
  }
  for (std::size_t h = 0; h < routes.hops.size(); ++h) {
    require(routes.num_destinations[h] > 0 || routes.feeds[h] != 0, who, ": relay hop ", h,
            " brings rows of entry ", routes.hops[h].shard, " to rank ", routes.hops[h].dst_rank,
            ", which neither needs nor forwards them");
  }
  const auto wrong = std::ranges::find_if(missing, [](std::int64_t rows) { return rows != 0; });
  if (wrong == missing.end()) return routes;
  const std::int64_t entry = wrong - missing.begin();
  const std::int64_t needed = routes.receivers[entry] * metadata.seq_len[entry];
  throw InvalidArgument(concat(who, ": the relay hops of entry ", entry, " bring ", needed - *wrong,
                               " rows to ranks that need them, expected ", needed));
}

std::vector<PartRoutes> follow_way(const char* who, std::span<const SequencePart> parts,
                                   const PartRows& needed, const ChosenWay& way) {
  std::vector<PartRoutes> routes;
  for (std::size_t p = 0; p < parts.size(); ++p)
    routes.push_back(follow_hops(who, *parts[p].metadata, way.hops[p], needed[p]));
  return routes;
}

ChosenWay choose_way(const char* who, SequenceOperation operation,
                     std::span<const SequencePart> parts, const CompileOptions& options) {
  const Topology topology = checked_topology(who, parts.front().metadata->world_size, options);
  const bool back = operation == SequenceOperation::kv_gradient;
  const auto seconds = [&](const Hops& hops) {
    std::vector<LinkBytes> links(topology.world_size);
    for (std::size_t p = 0; p < parts.size(); ++p)
      add_traffic(links, topology, operation, parts[p], hops[p]);
    return limit_seconds(links, options.plan.nvlink_bytes_per_second,
                         options.plan.network_bytes_per_second);
  };
  ChosenWay chosen;
  PlanLimits& limits = chosen.limits;
  Hops hops(parts.size());
  if (topology.num_nodes() > 1 && back) hops = hops_over_nodes(parts, topology, false);
  limits.direct_seconds = seconds(hops);
  limits.once_per_node_seconds = limits.direct_seconds;
  if (topology.num_nodes() > 1) {
    auto once = hops_over_nodes(parts, topology, true);
    limits.once_per_node_seconds = seconds(once);
    // Rows cross once in any case; sums, which are wider, where that takes less time.
    if (!back || limits.once_per_node_seconds < limits.direct_seconds) {
      limits.way = TransferMode::once_per_node;
      hops = std::move(once);
    }
  }
  const double without =
      limits.way == TransferMode::direct ? limits.direct_seconds : limits.once_per_node_seconds;
  limits.relay_seconds = without;
  const bool any = std::ranges::any_of(parts, has_relay);
  if (any) {
    auto relay = hops_by_schedules(who, parts, hops);
    limits.relay_seconds = seconds(relay);
    // On the way back on one node, adding up on the way costs more than the links give back.
    const bool pays = limits.relay_seconds <= 0.9 * without && !(back && topology.num_nodes() == 1);
    if (options.plan.relay == RelayUse::always ||
        (options.plan.relay == RelayUse::automatic && pays)) {
      limits.way = TransferMode::relay;
      hops = std::move(relay);
    }
  }
  const auto keeps_room = [](const SequencePart& part) { return part.min_batches > 0; };
  chosen.batched = topology.num_nodes() > 1 || limits.way == TransferMode::relay ||
                   std::ranges::any_of(parts, keeps_room);
  chosen.hops = std::move(hops);
  return chosen;
}

}  // namespace waybill::detail
