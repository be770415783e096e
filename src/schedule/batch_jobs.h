#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "routes.h"

namespace waybill::detail {

/// Work of one rank that others wait for, or that waits for others.
struct BatchJob {
  std::int32_t rank = 0;
  std::int64_t num_bytes = 0;
};

/// Jobs of all ranks in an order in which they can be done, as if every rank did one at a time and
/// each took as long as it has bytes: whoever is ready first comes first.
struct JobOrder {
  std::vector<std::int32_t> order;   ///< jobs
  std::vector<std::int64_t> ready;   ///< [jobs] when all that it waits for has ended
  std::vector<std::int64_t> start;   ///< [jobs] ready, or later when its rank was busy
  std::vector<std::int64_t> finish;  ///< [jobs] after start
};

/// @param edges (job, job that waits for it), no cycles
[[nodiscard]] JobOrder order_jobs(std::int32_t world_size, std::span<const BatchJob> jobs,
                                  std::span<const std::pair<std::int32_t, std::int32_t>> edges);

/// The hops of all parts grouped into batches. A batch is rows that one rank sends on when the same
/// batch of another has arrived (`after`), or its own (`after` -1).
class HopBatches {
 public:
  /// Own rows are grouped by bytes as the options say, where `groups_own` says so of a hop; other
  /// own hops have no batch.
  template <class GroupsOwn>
  HopBatches(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
             std::int64_t batch_bytes, GroupsOwn&& groups_own);

  /// The batch of `rank` that waits for `batch`; made when it is not there.
  std::int32_t behind(std::int32_t batch, std::int32_t rank);

  std::vector<BatchJob> jobs;
  std::vector<std::int32_t> after;            ///< [batches]
  std::vector<std::vector<std::int32_t>> of;  ///< [parts][hops] batch that carries the hop; -1

 private:
  void start_own(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
                 std::int64_t batch_bytes, const std::vector<std::vector<std::uint8_t>>& grouped);

  std::vector<std::vector<std::int32_t>> behind_;  ///< [batches] those that wait for it
};

/// Bytes of a row of all tensors of the part.
[[nodiscard]] std::int64_t row_bytes_of(const SequencePart& part);

/// How many bytes of `total` a batch should have.
[[nodiscard]] std::int64_t batch_size(std::int64_t total_bytes, std::int64_t batch_bytes);

template <class GroupsOwn>
HopBatches::HopBatches(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
                       std::int64_t batch_bytes, GroupsOwn&& groups_own) {
  std::vector<std::vector<std::uint8_t>> grouped(parts.size());
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
      const bool own = routes[p].hops[h].after < 0;
      grouped[p].push_back(own && groups_own(routes[p], h) ? 1 : 0);
    }
  }
  start_own(parts, routes, batch_bytes, grouped);
}

}  // namespace waybill::detail
