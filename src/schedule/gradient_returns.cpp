#include "gradient_returns.h"

#include <algorithm>
#include <limits>

#include "sort_unique.h"

namespace waybill::detail {

GradientReturns::GradientReturns(std::span<const SequencePart> parts,
                                 std::span<const PartRoutes> routes,
                                 std::span<const std::vector<std::int64_t>> rows_needed,
                                 const Topology& topology, std::int64_t batch_bytes) {
  find_kinds(routes, topology);
  find_batches(parts, routes, topology, batch_bytes);
  take_rows(routes, rows_needed);
  order_batches(routes, topology.world_size);
}

void GradientReturns::find_kinds(std::span<const PartRoutes> routes, const Topology& topology) {
  for (const PartRoutes& part : routes) {
    auto& kinds = kind.emplace_back();
    auto& keys = key.emplace_back(part.hops.size(), std::numeric_limits<std::int32_t>::max());
    for (std::size_t h = 0; h < part.hops.size(); ++h) {
      const bool feeds = part.feeds[h] != 0;
      if (is_read_at_copies(topology, part.hops[h], feeds)) {
        kinds.push_back(ReturnKind::read);
      } else {
        const bool alone = returns_rows(topology, part.hops[h], feeds, part.num_destinations[h]);
        kinds.push_back(alone ? ReturnKind::rows : ReturnKind::sum);
      }
    }
    // A hop stands after the one that feeds it, so what stands on it has been seen.
    for (std::size_t h = part.hops.size(); h-- > 0;) {
      if (part.first_destination[h] >= 0) keys[h] = std::min(keys[h], part.first_destination[h]);
      if (part.hops[h].after < 0) continue;
      std::int32_t& feed = keys[part.hops[h].after];
      feed = std::min(feed, keys[h]);
    }
  }
}

void GradientReturns::find_batches(std::span<const SequencePart> parts,
                                   std::span<const PartRoutes> routes, const Topology& topology,
                                   std::int64_t batch_bytes) {
  const HopBatches forward(parts, routes, batch_bytes, [&](const PartRoutes& part, std::size_t h) {
    return !is_read_at_copies(topology, part.hops[h], part.feeds[h] != 0);
  });
  std::vector<std::vector<std::int32_t>> of_forward(forward.jobs.size());
  for (std::size_t p = 0; p < parts.size(); ++p) {
    batch.emplace_back(routes[p].hops.size(), -1);
    const std::int64_t row_bytes = row_bytes_of(parts[p]);
    for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
      if (kind[p][h] == ReturnKind::read) continue;
      const RelayHop& hop = routes[p].hops[h];
      auto& candidates = of_forward[forward.of[p][h]];
      const auto found = std::ranges::find_if(
          candidates, [&](std::int32_t b) { return jobs[b].rank == hop.dst_rank; });
      std::int32_t batch_idx = found != candidates.end() ? *found : -1;
      if (batch_idx < 0) {
        batch_idx = static_cast<std::int32_t>(batches.size());
        candidates.push_back(batch_idx);
        jobs.push_back({hop.dst_rank, 0});
        batches.push_back(
            {.to = hop.src_rank,
             .network = topology.node(Rank{hop.src_rank}) != topology.node(Rank{hop.dst_rank})});
      }
      batch[p][h] = batch_idx;
      jobs[batch_idx].num_bytes += hop.num_rows * row_bytes;
      batches[batch_idx].sums = batches[batch_idx].sums || kind[p][h] == ReturnKind::sum;
    }
  }
}

void GradientReturns::take_rows(std::span<const PartRoutes> routes,
                                std::span<const std::vector<std::int64_t>> rows_needed) {
  const auto take = [](std::int64_t& used, std::int64_t count) {
    used += count;
    return used - count;
  };
  for (std::size_t p = 0; p < routes.size(); ++p) {
    WindowRows used{rows_needed[p], std::vector<std::int64_t>(rows_needed[p].size())};
    sum_row.emplace_back(routes[p].hops.size(), -1);
    land_row.emplace_back(routes[p].hops.size(), -1);
    for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
      const RelayHop& hop = routes[p].hops[h];
      if (kind[p][h] == ReturnKind::read) continue;
      const bool sum = kind[p][h] == ReturnKind::sum;
      if (sum) sum_row[p][h] = take(used.sums[hop.dst_rank], hop.num_rows);
      if (!batches[batch[p][h]].network) continue;
      land_row[p][h] = take((sum ? used.sums : used.tensor)[hop.src_rank], hop.num_rows);
    }
    rows.push_back(std::move(used));
  }
}

void GradientReturns::order_batches(std::span<const PartRoutes> routes, std::int32_t world_size) {
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  for (std::size_t p = 0; p < routes.size(); ++p) {
    for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
      const std::int32_t feed = routes[p].hops[h].after;
      if (feed >= 0 && batch[p][h] >= 0) edges.emplace_back(batch[p][h], batch[p][feed]);
    }
  }
  sort_unique(edges);
  order = order_jobs(world_size, jobs, edges);
  std::vector<std::int32_t> used(world_size);
  for (const std::int32_t b : order.order) {
    const std::int32_t rank = jobs[b].rank;
    const auto next = [&] { return used[rank]++ * world_size + rank; };
    if (batches[b].network && batches[b].sums) batches[b].own_slot = next();
    batches[b].slot = next();
  }
  num_slots = *std::ranges::max_element(used);
}

}  // namespace waybill::detail
