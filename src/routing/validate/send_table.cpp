#include "send_table.h"

namespace waybill::validation {

bool check_offsets(const char* table, const char* field, std::span<const std::int64_t> offsets,
                   std::int64_t num_parts, std::int64_t size, Findings& findings) {
  if (std::ssize(offsets) != num_parts + 1) {
    findings.add(FindingKind::shape, table, field, {}, concat(offsets.size(), " values"),
                 concat(num_parts + 1));
    return false;
  }
  if (offsets.front() != 0) {
    findings.add(FindingKind::shape, table, field, {.rank = 0}, offsets.front(), 0);
    return false;
  }
  for (std::int64_t i = 0; i < num_parts; ++i) {
    if (offsets[i] <= offsets[i + 1]) continue;
    findings.add(FindingKind::shape, table, field, {}, concat(offsets[i + 1], " at ", i + 1),
                 concat("at least ", offsets[i], ", the value before it"));
    return false;
  }
  if (offsets.back() != size) {
    findings.add(FindingKind::shape, table, field, {}, concat(offsets.back(), " at the end"), size);
    return false;
  }
  return true;
}

bool sum_lengths(SendTable& table, Findings& findings) {
  table.rank_rows.assign(table.world_size, 0);
  std::int64_t total = 0;
  std::int64_t copied = 0;
  for (std::int32_t r = 0; r < table.world_size; ++r) {
    std::int64_t rows = 0;
    for (std::int64_t entry = table.rank_offsets[r]; entry < table.rank_offsets[r + 1]; ++entry) {
      Entry& info = table.entries[entry];
      info.begin = rows;
      rows = add_rows(rows, info.len);
      const std::int64_t copies = table.copy_offsets.empty() ? 1
                                                             : table.destination_begin(entry + 1) -
                                                                   table.destination_begin(entry);
      std::int64_t sent = 0;
      if (__builtin_mul_overflow(copies, info.len, &sent)) sent = INT64_MAX;
      copied = add_rows(copied, sent);
    }
    table.rank_rows[r] = rows;
    total = add_rows(total, rows);
    // A reverse table has an entry per copy, so its lengths may add up to more than the tensor has.
    if (copied > max_offset || (total > max_total_rows && !table.reverse)) {
      findings.add(FindingKind::bounds, table.name, "seq_len", {.rank = r},
                   concat(total, " rows up to here, ", copied, " with copies"),
                   concat("at most ", max_total_rows, ", ", max_offset, " with copies"));
      return false;
    }
  }
  return true;
}

}  // namespace waybill::validation
