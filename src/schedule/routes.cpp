#include "routes.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "batch_jobs.h"
#include "plan_checks.h"
#include "planner/node_routes.h"
#include "routing/homes.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

/// Copies of the entries of hops. Hops are looked at entry by entry, in whatever order they stand.
struct EntryDestinations {
  std::vector<std::int32_t> count;      ///< [hops] of the entry on dst_rank
  std::vector<std::int32_t> first;      ///< [hops] the first of these, counted in the entry; or -1
  std::vector<std::int64_t> receivers;  ///< [entries] ranks with copies, but home; 0 without hops
};

/// @param hops of entries of the metadata, to ranks of its world
EntryDestinations count_destinations(const SparseMetadata& metadata, std::span<const RelayHop> hops,
                                     std::span<const std::int32_t> homes) {
  std::vector<std::int64_t> hops_of(metadata.num_entries() + 1);  // [entries + 1] first in by_line
  for (const RelayHop& hop : hops) ++hops_of[hop.shard + 1];
  std::partial_sum(hops_of.begin(), hops_of.end(), hops_of.begin());
  std::vector<std::size_t> by_entry(hops.size());
  std::vector<std::int64_t> fill = hops_of;
  for (std::size_t h = 0; h < hops.size(); ++h) by_entry[fill[hops[h].shard]++] = h;

  EntryDestinations copies;
  copies.count.resize(hops.size());
  copies.first.resize(hops.size());
  copies.receivers.resize(metadata.num_entries());
  std::vector<std::int32_t> count(metadata.world_size);  // of the entry at hand
  std::vector<std::int32_t> first(metadata.world_size, -1);
  for (std::int64_t entry = 0; entry < metadata.num_entries(); ++entry) {
    if (hops_of[entry] == hops_of[entry + 1]) continue;
    const std::int64_t begin = metadata.destination_begin(entry);
    for (auto c = begin; c < metadata.destination_end(entry); ++c) {
      const std::int32_t rank = metadata.dst_rank[c];
      if (count[rank]++ > 0) continue;
      first[rank] = static_cast<std::int32_t>(c - begin);
      if (rank != homes[entry]) ++copies.receivers[entry];
    }
    for (auto i = hops_of[entry]; i < hops_of[entry + 1]; ++i) {
      const std::size_t h = by_entry[i];
      copies.count[h] = count[hops[h].dst_rank];
      copies.first[h] = first[hops[h].dst_rank];
    }
    for (auto c = begin; c < metadata.destination_end(entry); ++c) {
      count[metadata.dst_rank[c]] = 0;
      first[metadata.dst_rank[c]] = -1;
    }
  }
  return copies;
}

std::int64_t sum_row_bytes_of(const SequencePart& part) {
  std::int64_t bytes = 0;
  for (const TensorFormat& format : part.tensors) bytes += sum_format(format).row_bytes();
  return bytes;
}

/// Bytes of the hops of a part and of its entries without hops. On the way back what a hop brought
/// in comes out, sums wider than rows.
void add_traffic(std::vector<LinkBytes>& links, const Topology& topology,
                 SequenceOperation operation, const SequencePart& part,
                 const std::vector<RelayHop>& hops) {
  const SparseMetadata& metadata = *part.metadata;
  const bool back = operation == SequenceOperation::kv_gradient;
  const std::vector<std::int32_t> homes = homes_of(metadata.rank_offsets);
  std::vector<std::uint8_t> feeds(hops.size());
  std::vector<std::uint8_t> has_hops(metadata.num_entries());
  for (const RelayHop& hop : hops) {
    if (hop.after >= 0) feeds[hop.after] = 1;
    has_hops[hop.shard] = 1;
  }
  const std::int64_t row_bytes = row_bytes_of(part);
  const std::int64_t sum_bytes = sum_row_bytes_of(part);
  const auto add = [&](std::int32_t src, std::int32_t dst, std::int64_t bytes) {
    add_hop(links, topology, back ? dst : src, back ? src : dst, bytes);
  };
  const EntryDestinations copies =
      back ? count_destinations(metadata, hops, homes) : EntryDestinations{};
  for (std::size_t h = 0; h < hops.size(); ++h) {
    const RelayHop& hop = hops[h];
    const bool feeding = feeds[h] != 0;
    std::int64_t bytes = row_bytes;
    if (back) {
      const std::int32_t count = copies.count[h];
      if (is_read_at_copies(topology, hop, feeding)) {
        bytes = count * row_bytes;
      } else if (!returns_rows(topology, hop, feeding, count)) {
        bytes = sum_bytes;
      }
    }
    add(hop.src_rank, hop.dst_rank, hop.num_rows * bytes);
  }
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    if (has_hops[j] != 0) continue;
    for (auto c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
      const std::int32_t dst = metadata.dst_rank[c];
      if (dst != homes[j]) add(homes[j], dst, metadata.seq_len[j] * row_bytes);
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
  require(bytes < most_call_bytes, who, ": the relay hops move ", bytes,
          " bytes, expected below 2^60");
}

Topology checked_topology(const char* who, std::int32_t world, const CompileOptions& options) {
  const Topology topology{world, options.ranks_per_node == 0 ? world : options.ranks_per_node};
  require(options.ranks_per_node >= 0 && world % topology.ranks_per_node == 0, who,
          ": ranks_per_node = ", options.ranks_per_node,
          ", expected 0 or a divisor of world_size = ", world);
  require(options.nvlink_bytes_per_second > 0 && options.network_bytes_per_second > 0, who,
          ": nvlink_bytes_per_second = ", options.nvlink_bytes_per_second,
          " and network_bytes_per_second = ", options.network_bytes_per_second, ", expected > 0");
  require(options.batch_bytes >= 0, who, ": batch_bytes = ", options.batch_bytes,
          ", expected >= 0");
  return topology;
}

bool has_relay(const SequencePart& part) { return part.relay != nullptr && !part.relay->empty(); }

/// Hops of all parts on different ways, and what they cost.
class WayFinder {
 public:
  WayFinder(const Topology& topology, SequenceOperation operation,
            std::span<const SequencePart> parts, const CompileOptions& options)
      : topology_(topology), operation_(operation), parts_(parts), options_(options) {}

  using Hops = std::vector<std::vector<RelayHop>>;

  [[nodiscard]] Hops over_nodes(bool once) const {
    Hops hops;
    for (const SequencePart& part : parts_)
      hops.push_back(route_over_nodes(*part.metadata, topology_, row_bytes_of(part), once).hops);
    return hops;
  }

  /// @param others for entries of which the schedules have no hops
  /// @throws InvalidArgument for schedules that do not fit
  [[nodiscard]] Hops by_schedules(const char* who, const Hops& others) const {
    Hops hops;
    const std::vector<std::int64_t> no_rows(topology_.world_size);
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      hops.push_back(others[p]);
      if (!has_relay(parts_[p])) continue;
      (void)follow_hops(who, *parts_[p].metadata, parts_[p].relay->hops, no_rows);
      check_hop_bytes(who, parts_[p]);
      hops.back() = completed(*parts_[p].metadata, *parts_[p].relay, others[p]);
    }
    return hops;
  }

  [[nodiscard]] double seconds(const Hops& hops) const {
    std::vector<LinkBytes> links(topology_.world_size);
    for (std::size_t p = 0; p < parts_.size(); ++p)
      add_traffic(links, topology_, operation_, parts_[p], hops[p]);
    return limit_seconds(links, options_.nvlink_bytes_per_second,
                         options_.network_bytes_per_second);
  }

 private:
  const Topology& topology_;
  SequenceOperation operation_;
  std::span<const SequencePart> parts_;
  const CompileOptions& options_;
};

}  // namespace

bool is_read_at_copies(const Topology& topology, const RelayHop& hop, bool feeds) {
  return !feeds && topology.node(Rank{hop.src_rank}) == topology.node(Rank{hop.dst_rank});
}

bool returns_rows(const Topology& topology, const RelayHop& hop, bool feeds,
                  std::int32_t num_destinations) {
  return !feeds && num_destinations == 1 && !is_read_at_copies(topology, hop, feeds);
}

PartRoutes follow_hops(const char* who, const SparseMetadata& metadata, std::vector<RelayHop> hops,
                       std::span<const std::int64_t> rows_needed) {
  PartRoutes routes;
  routes.hops = std::move(hops);
  routes.home = homes_of(metadata.rank_offsets);
  routes.has_hops.assign(metadata.num_entries(), 0);
  routes.feeds.assign(routes.hops.size(), 0);
  routes.passed_rows.assign(metadata.world_size, 0);
  const RelayedShards shards{metadata.world_size, metadata.seq_len, routes.home};
  double total_rows = 0;
  for (std::size_t h = 0; h < routes.hops.size(); ++h) {
    const RelayHop& hop = routes.hops[h];
    const char* const expected = wrong_with_hop(routes.hops, h, shards);
    require(expected == nullptr, who, ": relay hop ", h, ": ", hop.num_rows, " rows from ",
            hop.row_begin, " of shard ", hop.shard, ", from rank ", hop.src_rank, " to ",
            hop.dst_rank, ", expected ", expected);
    routes.has_hops[hop.shard] = 1;
    if (hop.after >= 0) routes.feeds[hop.after] = 1;
    total_rows += static_cast<double>(hop.num_rows);
  }
  require(total_rows < most_call_bytes, who, ": the relay hops move ", total_rows,
          " rows, expected below 2^60");
  EntryDestinations copies = count_destinations(metadata, routes.hops, routes.home);
  std::vector<std::int64_t> missing(metadata.num_entries());  // rows of receivers without a hop
  for (std::size_t j = 0; j < missing.size(); ++j)
    missing[j] = copies.receivers[j] * metadata.seq_len[j];
  for (std::size_t h = 0; h < routes.hops.size(); ++h) {
    const RelayHop& hop = routes.hops[h];
    if (copies.count[h] > 0) {
      missing[hop.shard] -= hop.num_rows;
      const auto copy = metadata.destination_begin(hop.shard) + copies.first[h];
      routes.dst_row.push_back(metadata.dst_offset[copy] + hop.row_begin);
    } else {
      std::int64_t& passed = routes.passed_rows[hop.dst_rank];
      routes.dst_row.push_back(rows_needed[hop.dst_rank] + passed);
      passed += hop.num_rows;
    }
  }
  routes.num_destinations = std::move(copies.count);
  routes.first_destination = std::move(copies.first);
  for (std::size_t h = 0; h < routes.hops.size(); ++h) {
    require(routes.num_destinations[h] > 0 || routes.feeds[h] != 0, who, ": relay hop ", h,
            " brings rows of entry ", routes.hops[h].shard, " to rank ", routes.hops[h].dst_rank,
            ", which neither needs nor forwards them");
  }
  const auto wrong = std::ranges::find_if(missing, [](std::int64_t rows) { return rows != 0; });
  if (wrong == missing.end()) return routes;
  const std::int64_t entry = wrong - missing.begin();
  const std::int64_t needed = copies.receivers[entry] * metadata.seq_len[entry];
  throw InvalidArgument(concat(who, ": the relay hops of entry ", entry, " bring ", needed - *wrong,
                               " rows to ranks that need them, expected ", needed));
}

ChosenWay choose_way(const char* who, SequenceOperation operation,
                     std::span<const SequencePart> parts, const CompileOptions& options) {
  const Topology topology = checked_topology(who, parts.front().metadata->world_size, options);
  const bool back = operation == SequenceOperation::kv_gradient;
  const WayFinder finder(topology, operation, parts, options);
  ChosenWay chosen;
  PlanLimits& limits = chosen.limits;
  std::vector<std::vector<RelayHop>> hops(parts.size());
  if (topology.num_nodes() > 1 && back) hops = finder.over_nodes(false);
  limits.direct_seconds = finder.seconds(hops);
  limits.once_per_node_seconds = limits.direct_seconds;
  if (topology.num_nodes() > 1) {
    auto once = finder.over_nodes(true);
    limits.once_per_node_seconds = finder.seconds(once);
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
    auto relay = finder.by_schedules(who, hops);
    limits.relay_seconds = finder.seconds(relay);
    // On the way back on one node, adding up on the way costs more than the links give back.
    const bool pays = limits.relay_seconds <= 0.9 * without && !(back && topology.num_nodes() == 1);
    if (options.relay == RelayUse::always || (options.relay == RelayUse::automatic && pays)) {
      limits.way = TransferMode::relay;
      hops = std::move(relay);
    }
  }
  chosen.batched = topology.num_nodes() > 1 || limits.way == TransferMode::relay;
  chosen.hops = std::move(hops);
  return chosen;
}

}  // namespace waybill::detail
