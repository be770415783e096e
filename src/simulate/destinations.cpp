#include <algorithm>
#include <compare>

#include "copy_job.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

Destinations group_by_destination(const std::vector<CopySegment>& segments, std::size_t world) {
  Destinations groups;
  groups.offsets.assign(world + 1, 0);
  for (const CopySegment& segment : segments) {
    ++groups.offsets[static_cast<std::size_t>(segment.dst_rank) + 1];
  }
  for (std::size_t r = 0; r < world; ++r) groups.offsets[r + 1] += groups.offsets[r];
  groups.segments.resize(segments.size());
  std::vector<std::int64_t> next(groups.offsets.begin(), groups.offsets.end() - 1);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const auto r = static_cast<std::size_t>(segments[i].dst_rank);
    groups.segments[static_cast<std::size_t>(next[r]++)] = static_cast<std::int64_t>(i);
  }
  return groups;
}

/// A segment by its first row at the destination; ties in the global order.
struct Placed {
  std::int64_t row;
  std::size_t segment;

  friend auto operator<=>(const Placed&, const Placed&) = default;
};

[[noreturn]] void fail_overlap(const CopyJob& job, const CopySegment& earlier,
                               const CopySegment& later) {
  fail_at(job, later,
          concat("rows ", std::max(earlier.dst_row, later.dst_row), "..",
                 std::min(earlier.dst_row + earlier.rows, later.dst_row + later.rows) - 1,
                 " of the destination are also written by source rank ", earlier.src_rank,
                 ", shard ", earlier.shard, ", copy ", earlier.copy, " at offset ", earlier.dst_row,
                 ", length ", earlier.rows));
}

}  // namespace

Destinations find_destinations(const CopyJob& job, const std::vector<CopySegment>& segments,
                               Overlap overlap) {
  Destinations groups = group_by_destination(segments, job.sources.size());
  std::vector<Placed> placed;
  for (std::size_t r = 0; r < job.sources.size(); ++r) {
    placed.clear();
    for (std::int64_t k = groups.offsets[r]; k < groups.offsets[r + 1]; ++k) {
      const auto segment = static_cast<std::size_t>(groups.segments[static_cast<std::size_t>(k)]);
      placed.push_back({segments[segment].dst_row, segment});
    }
    if (!std::ranges::is_sorted(placed)) std::ranges::sort(placed);
    // In the order of their first rows, it is enough to look at neighbours.
    for (std::size_t k = 1; k < placed.size(); ++k) {
      const auto [earlier, later] = std::minmax(placed[k - 1].segment, placed[k].segment);
      if (placed[k].row >= placed[k - 1].row + segments[placed[k - 1].segment].rows) continue;
      if (overlap == Overlap::reject) fail_overlap(job, segments[earlier], segments[later]);
      groups.overlapping = true;
    }
  }
  return groups;
}

}  // namespace waybill::detail
