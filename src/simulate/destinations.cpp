#include <algorithm>
#include <compare>
#include <cstdint>
#include <vector>

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
  fail_at(job, later, later.dst_rank,
          concat("rows ", std::max(earlier.dst_row, later.dst_row), "..",
                 std::min(earlier.dst_row + earlier.rows, later.dst_row + later.rows) - 1,
                 " of the destination are also written by source rank ", earlier.src_rank,
                 ", shard ", earlier.shard, ", copy ", earlier.copy, " at offset ", earlier.dst_row,
                 ", length ", earlier.rows));
}

/// Every destination is filled upwards: nothing overlaps, and nothing is left to look at.
bool come_in_order(const CopyJob& job, const std::vector<CopySegment>& segments) {
  std::vector<std::int64_t> filled(job.outputs.size());
  return std::ranges::all_of(segments, [&](const CopySegment& segment) {
    std::int64_t& end = filled[static_cast<std::size_t>(segment.dst_rank)];
    const bool above = segment.dst_row >= end;
    end = segment.dst_row + segment.rows;
    return above;
  });
}

/// A bit a row of every output, set when a segment takes it.
class TakenRows {
 public:
  explicit TakenRows(const CopyJob& job) {
    for (const TensorView& output : job.outputs) {
      first_word_.push_back(num_words_);
      num_words_ = std::min(num_words_ + output.shape[0] / 64 + 1, most_words);
    }
  }

  /// Up to most_words.
  [[nodiscard]] std::int64_t num_words() const { return num_words_; }
  void clear() { words_.assign(static_cast<std::size_t>(num_words_), 0); }

  /// False: one of the rows was taken before.
  [[nodiscard]] bool take(const CopySegment& segment) {
    std::uint64_t* words = words_.data() + first_word_[static_cast<std::size_t>(segment.dst_rank)];
    bool free = true;
    for (std::int64_t row = segment.dst_row, end = row + segment.rows; row < end;) {
      const std::int64_t count = std::min(end - row, 64 - row % 64);
      const std::uint64_t mask = (~std::uint64_t{0} >> (64 - count)) << (row % 64);
      free = free && (words[row / 64] & mask) == 0;
      words[row / 64] |= mask;
      row += count;
    }
    return free;
  }

 private:
  static constexpr std::int64_t most_words = std::int64_t{1} << 60;  // more is never cleared

  std::vector<std::int64_t> first_word_;
  std::int64_t num_words_ = 0;
  std::vector<std::uint64_t> words_;
};

/// True: no row is taken twice. False: perhaps; sorting will tell. Linear in the segments and the
/// rows that they write, of which it reads 64 at a time.
bool surely_disjoint(const CopyJob& job, const std::vector<CopySegment>& segments) {
  if (come_in_order(job, segments)) return true;
  TakenRows taken(job);
  constexpr std::int64_t words_per_segment = 64;
  if (taken.num_words() / words_per_segment > std::ssize(segments)) return false;
  taken.clear();
  return std::ranges::all_of(segments,
                             [&](const CopySegment& segment) { return taken.take(segment); });
}

}  // namespace

Destinations find_destinations(const CopyJob& job, const std::vector<CopySegment>& segments,
                               Overlap overlap) {
  if (surely_disjoint(job, segments)) return {};
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
