#include <algorithm>
#include <utility>

#include "arrivals.h"

namespace waybill::validation {
namespace {

/// The first row to which a copy returns: `copy * T + begin`. -1 where that is beyond int64.
std::int64_t home_row(const SendTable& forward, const Arrival& a) {
  const Line& line = forward.lines[at(a.line)];
  std::int64_t row = 0;
  if (__builtin_mul_overflow(a.slot, forward.rank_rows[at(line.rank)], &row)) return -1;
  return __builtin_add_overflow(row, line.begin, &row) ? -1 : row;
}

/// Compares what one rank received with what it sends back.
class ReverseOfRank {
 public:
  ReverseOfRank(const SendTable& forward, const Arrivals& arrivals, const SendTable& reverse,
                std::int32_t rank, Findings& findings)
      : forward_(forward),
        reverse_(reverse),
        rank_(rank),
        tiled_(arrivals.tiled[at(rank)] != 0),
        arrived_(arrivals.of(rank)),
        findings_(findings) {
    // Padding of the dense form has no copy, so copies are the entries.
    first_copy_ = reverse.copy_begin(reverse.rank_offsets[at(rank)]);
    num_copies_ = reverse.copy_begin(reverse.rank_offsets[at(rank + 1)]) - first_copy_;
    line_ = reverse.rank_offsets[at(rank)];
  }

  void run() {
    const std::int64_t num_arrived = std::ssize(arrived_);
    const bool complete = num_copies_ == num_arrived;
    if (!complete) {
      findings_.add(FindingKind::transpose, reverse_.name, "seq_len", {.rank = rank_},
                    concat(num_copies_, " entries"),
                    concat(num_arrived, ", one for each that the rank received"));
    }
    for (std::int64_t t = 0; t < std::min(num_arrived, num_copies_);) {
      const Arrival& a = arrived_[at(t)];
      const Line& line = forward_.lines[at(a.line)];
      const std::int64_t copy = first_copy_ + t;
      seek(copy);
      if (reverse_.lines[at(line_)].len == line.len && reverse_.dst_rank[at(copy)] == line.rank &&
          reverse_.dst_row[at(copy)] == home_row(forward_, a)) [[likely]] {
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
  /// Moves line_ on to the line of a copy.
  void seek(std::int64_t copy) {
    while (reverse_.copy_begin(line_ + 1) <= copy) ++line_;
  }

  [[nodiscard]] std::int64_t reverse_len(std::int64_t t) {
    seek(first_copy_ + t);
    return reverse_.lines[at(line_)].len;
  }

  /// Shards without rows that land on the same row have no order among themselves. The end of
  /// the run of such shards at t, if both sides hold the same ones; otherwise t.
  [[gnu::cold]] std::int64_t empty_run(std::int64_t t) {
    using Home = std::pair<std::int32_t, std::int64_t>;
    std::vector<Home> expected;
    std::vector<Home> got;
    const std::int64_t line_before = line_;
    std::int64_t end = t;
    for (; end < std::min(std::ssize(arrived_), num_copies_); ++end) {
      const Arrival& a = arrived_[at(end)];
      const Line& line = forward_.lines[at(a.line)];
      if (line.len != 0 || reverse_len(end) != 0) break;
      expected.emplace_back(line.rank, home_row(forward_, a));
      got.emplace_back(reverse_.dst_rank[at(first_copy_ + end)],
                       reverse_.dst_row[at(first_copy_ + end)]);
    }
    std::sort(expected.begin(), expected.end());
    std::sort(got.begin(), got.end());
    if (expected == got) return end;
    line_ = line_before;
    return t;
  }

  [[gnu::cold]] void report(const Arrival& a, std::int64_t copy) {
    const Line& line = forward_.lines[at(a.line)];
    const Place place = reverse_.place(line_);
    const Place home = forward_.place(a.line, a.slot);
    const std::string of =
        concat(", as of rank ", home.rank, ", shard ", home.shard, ", copy ", home.copy);
    if (reverse_.lines[at(line_)].len != line.len) {
      findings_.add(FindingKind::transpose, reverse_.name, "seq_len", place,
                    reverse_.lines[at(line_)].len, concat(line.len, of));
    }
    if (reverse_.dst_rank[at(copy)] != line.rank) {
      findings_.add(FindingKind::transpose, reverse_.name, "dst_rank", place,
                    reverse_.dst_rank[at(copy)], concat(line.rank, of));
    } else if (reverse_.dst_row[at(copy)] != home_row(forward_, a)) {
      findings_.add(forward_.one_copy ? FindingKind::identity : FindingKind::transpose,
                    reverse_.name, "dst_offset", place, reverse_.dst_row[at(copy)],
                    concat(home_row(forward_, a), of));
    }
  }

  const SendTable& forward_;
  const SendTable& reverse_;
  std::int32_t rank_;
  bool tiled_;
  std::span<const Arrival> arrived_;
  Findings& findings_;
  std::int64_t first_copy_ = 0;
  std::int64_t num_copies_ = 0;
  std::int64_t line_ = 0;
};

}  // namespace

void check_reverse(const SendTable& forward, const Arrivals& arrivals, const SendTable& reverse,
                   Findings& findings) {
  for (std::int32_t r = 0; r < forward.world_size && !findings.full(); ++r) {
    ReverseOfRank(forward, arrivals, reverse, r, findings).run();
  }
}

}  // namespace waybill::validation
