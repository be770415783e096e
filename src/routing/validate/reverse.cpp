#include <algorithm>
#include <utility>

#include "arrivals.h"

namespace waybill::validation {
namespace {

/// The first row to which a copy returns: `copy * T + begin`. -1 where that is beyond int64.
std::int64_t home_row(const SendTable& forward, const Arrival& a) {
  const Entry& entry = forward.entries[a.entry];
  std::int64_t row = 0;
  if (__builtin_mul_overflow(a.slot, forward.rank_rows[entry.rank], &row)) return -1;
  return __builtin_add_overflow(row, entry.begin, &row) ? -1 : row;
}

/// Compares what one rank received with what it sends back.
class ReverseOfRank {
 public:
  ReverseOfRank(const SendTable& forward, const Arrivals& arrivals, const SendTable& reverse,
                std::int32_t rank, Findings& findings)
      : forward_(forward),
        reverse_(reverse),
        rank_(rank),
        tiled_(arrivals.tiled[rank] != 0),
        arrived_(arrivals.of(rank)),
        findings_(findings) {
    // Padding of the dense form has no copy, so copies are the entries.
    first_destination_ = reverse.destination_begin(reverse.rank_offsets[rank]);
    num_destinations_ =
        reverse.destination_begin(reverse.rank_offsets[rank + 1]) - first_destination_;
    entry_ = reverse.rank_offsets[rank];
  }

  void run() {
    const std::int64_t num_arrived = std::ssize(arrived_);
    const bool complete = num_destinations_ == num_arrived;
    if (!complete) {
      findings_.add(FindingKind::transpose, reverse_.name, "seq_len", {.rank = rank_},
                    concat(num_destinations_, " entries"),
                    concat(num_arrived, ", one for each that the rank received"));
    }
    for (std::int64_t t = 0; t < std::min(num_arrived, num_destinations_);) {
      const Arrival& a = arrived_[t];
      const Entry& entry = forward_.entries[a.entry];
      const std::int64_t copy = first_destination_ + t;
      seek(copy);
      if (reverse_.entries[entry_].len == entry.len && reverse_.dst_rank[copy] == entry.rank &&
          reverse_.dst_row[copy] == home_row(forward_, a)) [[likely]] {
        ++t;
        continue;
      }
      const std::int64_t same_until = empty_run(t);
      if (same_until > t) {
        t = same_until;
        continue;
      }
      report(a, copy);
      if (findings_.full() || !complete || !tiled_) return;  // the rest is shifted
      ++t;
    }
  }

 private:
  /// Moves line_ on to the entry of a copy.
  void seek(std::int64_t copy) {
    while (reverse_.destination_begin(entry_ + 1) <= copy) ++entry_;
  }

  [[nodiscard]] std::int64_t reverse_len(std::int64_t t) {
    seek(first_destination_ + t);
    return reverse_.entries[entry_].len;
  }

  /// Shards without rows that land on the same row have no order among themselves. The end of
  /// the run of such shards at t, if both sides hold the same ones; otherwise t.
  [[gnu::cold]] std::int64_t empty_run(std::int64_t t) {
    using Home = std::pair<std::int32_t, std::int64_t>;
    std::vector<Home> expected;
    std::vector<Home> got;
    const std::int64_t entry_before = entry_;
    std::int64_t end = t;
    for (; end < std::min(std::ssize(arrived_), num_destinations_); ++end) {
      const Arrival& a = arrived_[end];
      const Entry& entry = forward_.entries[a.entry];
      if (entry.len != 0 || reverse_len(end) != 0) break;
      expected.emplace_back(entry.rank, home_row(forward_, a));
      got.emplace_back(reverse_.dst_rank[first_destination_ + end],
                       reverse_.dst_row[first_destination_ + end]);
    }
    std::sort(expected.begin(), expected.end());
    std::sort(got.begin(), got.end());
    if (expected == got) return end;
    entry_ = entry_before;
    return t;
  }

  [[gnu::cold]] void report(const Arrival& a, std::int64_t copy) {
    const Entry& entry = forward_.entries[a.entry];
    const Place place = reverse_.place(entry_);
    const Place home = forward_.place(a.entry, a.slot);
    const std::string of =
        concat(", as of rank ", home.rank, ", shard ", home.shard, ", copy ", home.copy);
    if (reverse_.entries[entry_].len != entry.len) {
      findings_.add(FindingKind::transpose, reverse_.name, "seq_len", place,
                    reverse_.entries[entry_].len, concat(entry.len, of));
    }
    if (reverse_.dst_rank[copy] != entry.rank) {
      findings_.add(FindingKind::transpose, reverse_.name, "dst_rank", place,
                    reverse_.dst_rank[copy], concat(entry.rank, of));
    } else if (reverse_.dst_row[copy] != home_row(forward_, a)) {
      findings_.add(forward_.one_copy ? FindingKind::identity : FindingKind::transpose,
                    reverse_.name, "dst_offset", place, reverse_.dst_row[copy],
                    concat(home_row(forward_, a), of));
    }
  }

  const SendTable& forward_;
  const SendTable& reverse_;
  std::int32_t rank_;
  bool tiled_;
  std::span<const Arrival> arrived_;
  Findings& findings_;
  std::int64_t first_destination_ = 0;
  std::int64_t num_destinations_ = 0;
  std::int64_t entry_ = 0;
};

}  // namespace

void check_reverse(const SendTable& forward, const Arrivals& arrivals, const SendTable& reverse,
                   Findings& findings) {
  for (std::int32_t r = 0; r < forward.world_size && !findings.full(); ++r) {
    ReverseOfRank(forward, arrivals, reverse, r, findings).run();
  }
}

}  // namespace waybill::validation
