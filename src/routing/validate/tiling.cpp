#include "arrivals.h"

namespace waybill::validation {
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

}  // namespace waybill::validation
