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

/// Says how an entry of the reverse table differs from the arrival that it answers.
[[gnu::cold]] void report_entry(const SendTable& forward, const Arrival& a,
                                const SendTable& reverse, std::int64_t at, Findings& findings) {
  const Entry& entry = forward.entries[a.entry];
  const std::int64_t copy = reverse.destination_begin(at);
  const Place place = reverse.place(at);
  const Place home = forward.place(a.entry, a.slot);
  const std::string of =
      concat(", as of rank ", home.rank, ", shard ", home.shard, ", copy ", home.copy);
  if (reverse.entries[at].len != entry.len) {
    findings.add(FindingKind::transpose, reverse.name, "seq_len", place, reverse.entries[at].len,
                 concat(entry.len, of));
  }
  if (reverse.dst_rank[copy] != entry.rank) {
    findings.add(FindingKind::transpose, reverse.name, "dst_rank", place, reverse.dst_rank[copy],
                 concat(entry.rank, of));
  } else if (reverse.dst_row[copy] != home_row(forward, a)) {
    findings.add(forward.one_copy ? FindingKind::identity : FindingKind::transpose, reverse.name,
                 "dst_offset", place, reverse.dst_row[copy], concat(home_row(forward, a), of));
  }
}

/// Shards without rows that land on the same row have no order among themselves. How many arrivals
/// the run of such shards has, if the entries hold the same ones; otherwise 0.
[[gnu::cold]] std::int64_t empty_run(const SendTable& forward, std::span<const Arrival> arrived,
                                     const SendTable& reverse,
                                     std::span<const std::int64_t> entries) {
  std::vector<std::pair<std::int32_t, std::int64_t>> expected, got;
  for (std::size_t t = 0; t < std::min(arrived.size(), entries.size()); ++t) {
    const Entry& entry = forward.entries[arrived[t].entry];
    if (entry.len != 0 || reverse.entries[entries[t]].len != 0) break;
    const std::int64_t copy = reverse.destination_begin(entries[t]);
    expected.emplace_back(entry.rank, home_row(forward, arrived[t]));
    got.emplace_back(reverse.dst_rank[copy], reverse.dst_row[copy]);
  }
  std::ranges::sort(expected);
  std::ranges::sort(got);
  return expected == got ? std::ssize(got) : 0;
}

/// Compares what one rank received with what it sends back.
/// @param entries of the reverse table, where the rank sends something
void check_reverse_of(const SendTable& forward, std::span<const Arrival> arrived, bool is_tiled,
                      const SendTable& reverse, std::span<const std::int64_t> entries,
                      std::int32_t rank, Findings& findings) {
  const std::int64_t num_arrived = std::ssize(arrived), num_entries = std::ssize(entries);
  const bool complete = num_entries == num_arrived;
  if (!complete) {
    findings.add(FindingKind::transpose, reverse.name, "seq_len", {.rank = rank},
                 concat(num_entries, " entries"),
                 concat(num_arrived, ", one for each that the rank received"));
  }
  for (std::int64_t t = 0; t < std::min(num_arrived, num_entries);) {
    const Arrival& a = arrived[t];
    const Entry& entry = forward.entries[a.entry];
    const std::int64_t copy = reverse.destination_begin(entries[t]);
    if (reverse.entries[entries[t]].len == entry.len && reverse.dst_rank[copy] == entry.rank &&
        reverse.dst_row[copy] == home_row(forward, a)) [[likely]] {
      ++t;
    } else if (const std::int64_t same =
                   empty_run(forward, arrived.subspan(t), reverse, entries.subspan(t))) {
      t += same;
    } else {
      report_entry(forward, a, reverse, entries[t++], findings);
      if (findings.full() || !complete || !is_tiled) return;  // the rest is shifted
    }
  }
}

}  // namespace

void check_reverse(const SendTable& forward, const Arrivals& arrivals, const SendTable& reverse,
                   Findings& findings) {
  std::vector<std::int64_t> entries;
  for (std::int32_t r = 0; r < forward.world_size && !findings.full(); ++r) {
    entries.clear();  // padding of the dense form has no copy
    for (std::int64_t i = reverse.rank_offsets[r]; i < reverse.rank_offsets[r + 1]; ++i)
      if (reverse.destination_end(i) > reverse.destination_begin(i)) entries.push_back(i);
    check_reverse_of(forward, arrivals.of(r), arrivals.tiled[r] != 0, reverse, entries, r,
                     findings);
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
