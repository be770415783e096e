#include <algorithm>
#include <array>
#include <utility>

#include "checks.h"
#include "routing/homes.h"

namespace waybill::validation {
namespace {

template <class Key>
void insertion_sort(std::span<Arrival> list, const Key& key) {
  for (std::size_t i = 1; i < list.size(); ++i) {
    const Arrival moving = list[i];
    std::size_t place = i;
    for (; place > 0 && key(list[place - 1]) > key(moving); --place) list[place] = list[place - 1];
    list[place] = moving;
  }
}

/// Stable, least significant byte first; digits that are the same everywhere are skipped.
template <class Key>
void radix_sort(std::span<Arrival> list, const Key& key, std::vector<Arrival>& scratch) {
  std::uint64_t differing = 0;
  for (const Arrival& a : list) differing |= key(a) ^ key(list[0]);
  scratch.resize(list.size());
  for (int shift = 0; shift < 64 && (differing >> shift) != 0; shift += 8) {
    if (((differing >> shift) & 255) == 0) continue;
    std::array<std::size_t, 257> next{};
    for (const Arrival& a : list) ++next[((key(a) >> shift) & 255) + 1];
    for (std::size_t digit = 1; digit < next.size(); ++digit) next[digit] += next[digit - 1];
    for (const Arrival& a : list) scratch[next[(key(a) >> shift) & 255]++] = a;
    std::copy(scratch.begin(), scratch.end(), list.begin());
  }
}

}  // namespace

Arrivals sort_arrivals(const SendTable& table) {
  const std::int64_t world = table.world_size;
  Arrivals result;
  detail::offsets_by(table.dst_rank, world, result.offsets);
  result.rows.assign(world, 0);
  result.list.resize(table.num_destinations());
  result.tiled.assign(world, 1);
  std::vector<std::int64_t> next(result.offsets.begin(), result.offsets.end() - 1);
  for (std::int64_t entry = 0; entry < table.num_entries(); ++entry) {
    const std::int64_t first = table.destination_begin(entry);
    const std::int64_t last = table.destination_end(entry);
    const std::int64_t len = table.entries[entry].len;
    for (std::int64_t c = first; c < last; ++c) {
      const std::size_t r = table.dst_rank[c];
      if (table.dst_row[c] != result.rows[r]) result.tiled[r] = 0;
      result.list[next[r]++] = {.row = table.dst_row[c],
                                .entry = static_cast<std::int32_t>(entry),
                                .slot = static_cast<std::int32_t>(table.slot(entry, c))};
      result.rows[r] += len;
    }
  }
  const auto key = [&](const Arrival& a) {  // by row; without rows first
    return static_cast<std::uint64_t>(a.row) * 2 + (table.entries[a.entry].len > 0 ? 1 : 0);
  };
  std::vector<Arrival> scratch;
  for (std::int64_t r = 0; r < world; ++r) {
    if (result.tiled[r] != 0) continue;  // without gaps in the global order, hence in order
    const std::span<Arrival> list(result.list.data() + result.offsets[r],
                                  result.list.data() + result.offsets[r + 1]);
    const auto falls = [&](const Arrival& a, const Arrival& b) { return key(a) > key(b); };
    if (std::adjacent_find(list.begin(), list.end(), falls) == list.end()) continue;
    constexpr std::size_t few = 24;  // counting 256 digits costs more than moving these
    if (list.size() <= few) {
      insertion_sort(list, key);
    } else {
      radix_sort(list, key, scratch);
    }
  }
  return result;
}

namespace {

/// One buffer, of which the good path found that it is not tiled: says where.
[[gnu::cold]] void report_tiling(const SendTable& table, const Arrivals& arrivals,
                                 std::int32_t rank, Findings& findings) {
  std::int64_t next = 0;  // first row that nobody has written yet
  std::int64_t previous = -1;
  for (const Arrival& a : arrivals.of(rank)) {
    if (findings.full()) return;
    const Place place = table.place(a.entry, a.slot);
    const std::int64_t end = add_rows(a.row, table.entries[a.entry].len);
    const std::string where = concat(" on rank ", rank);
    if (a.row > next) {
      findings.add(FindingKind::coverage, table.name, "dst_offset", place, concat(a.row, where),
                   concat(next, "; nobody writes the rows between"));
    } else if (a.row < next) {
      const Place other = previous < 0 ? Place{} : table.place(previous);
      findings.add(FindingKind::overlap, table.name, "dst_offset", place, concat(a.row, where),
                   concat("at least ", next, "; rank ", other.rank, ", shard ", other.shard,
                          " writes up to there"));
    }
    if (end > arrivals.rows[rank]) {
      findings.add(FindingKind::bounds, table.name, "dst_offset", place,
                   concat("rows ", a.row, "..", end, where),
                   concat("an end of at most ", arrivals.rows[rank], ", the rows received"));
    }
    if (end > next) {
      next = end;
      previous = a.entry;
    }
  }
}

}  // namespace

void check_tiling(const SendTable& table, Arrivals& arrivals, Findings& findings) {
  for (std::int32_t r = 0; r < table.world_size; ++r) {
    if (arrivals.tiled[r] != 0) continue;
    std::int64_t next = 0;
    bool tiled = true;
    for (const Arrival& a : arrivals.of(r)) {
      tiled &= a.row == next;
      next += table.entries[a.entry].len;
    }
    arrivals.tiled[r] = tiled ? 1 : 0;
    if (tiled) continue;
    report_tiling(table, arrivals, r, findings);
  }
}

void check_capacity(const SendTable& table, const Arrivals& arrivals, std::int64_t capacity,
                    Findings& findings) {
  if (capacity < 0) return;
  for (std::int32_t r = 0; r < table.world_size; ++r) {
    if (arrivals.rows[r] <= capacity) continue;
    findings.add(FindingKind::capacity, table.name, "num_recv_tokens", {.rank = r},
                 arrivals.rows[r], concat("at most ", capacity, ", the capacity"));
  }
}

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
    while (reverse_.destination_end(entry_) <= copy) ++entry_;
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

void check_planes(const Metadata& reverse, const SendTable& table, const Arrivals& arrivals,
                  Findings& findings) {
  const IndexArray& mask_array = *reverse.seq_recv_mask;
  const std::int64_t world = table.world_size;
  if (!reverse.recv_seq_lens || reverse.recv_seq_lens->ndim() != 2) {
    findings.add(FindingKind::mask, table.name, "recv_seq_lens", {}, "none of shape [W, S]",
                 "one, as there is seq_recv_mask");
    return;
  }
  const std::int64_t shards = reverse.recv_seq_lens->dim(1);
  const std::int64_t copies = mask_array.ndim() == 3 ? mask_array.dim(2) : 0;
  if (!check_shape(table.name, "recv_seq_lens", *reverse.recv_seq_lens, {world, shards},
                   findings) ||
      !check_shape(table.name, "seq_recv_mask", mask_array, {world, shards, copies}, findings)) {
    return;
  }
  const IndexReader mask(mask_array);
  const IndexReader lens(*reverse.recv_seq_lens);
  for (std::int32_t r = 0; r < table.world_size && !findings.full(); ++r) {
    const std::span<const Arrival> arrived = arrivals.of(r);
    std::int64_t next = 0;
    const auto skip_empty = [&] {
      while (next < std::ssize(arrived) && table.entries[arrived[next].entry].len == 0) ++next;
    };
    const auto arrived_text = [&] {
      const Entry& entry = table.entries[arrived[next].entry];
      const std::int64_t row = arrived[next].row;
      return concat("rows ", row, "..", add_rows(row, entry.len), " from rank ", entry.rank,
                    ", shard ", entry.shard);
    };
    skip_empty();
    std::int64_t row = 0;  // copy * T + begin, as the planes follow each other
    bool good = true;      // the rest of the rank would only repeat what is wrong
    for (std::int64_t i = 0; i < copies * shards && good; ++i) {
      const Place place{.rank = r, .shard = i % shards, .copy = i / shards};
      const std::int64_t rows = lens[r * shards + place.shard];
      const bool used = mask[(r * shards + place.shard) * copies + place.copy] != 0;
      if (rows < 0) {
        findings.add(FindingKind::negative, table.name, "recv_seq_lens",
                     {.rank = r, .shard = place.shard}, rows, ">= 0");
        good = false;
      } else if (used && rows > 0) {
        good = next < std::ssize(arrived) && arrived[next].row == row &&
               table.entries[arrived[next].entry].len == rows;
        if (!good) {
          findings.add(FindingKind::coverage, table.name, "dst_offset", place,
                       next < std::ssize(arrived) ? arrived_text() : "nothing more arrives",
                       concat("rows ", row, "..", add_rows(row, rows), ", as seq_recv_mask says"));
        } else {
          ++next;
          skip_empty();
        }
      }
      row = add_rows(row, std::max<std::int64_t>(0, rows));
    }
    if (good && next < std::ssize(arrived))
      findings.add(FindingKind::mask, table.name, "dst_offset", {.rank = r}, arrived_text(),
                   "nothing there: no copy in seq_recv_mask begins here");
  }
}

}  // namespace waybill::validation
