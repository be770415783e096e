#include <type_traits>

#include "send_table.h"
#include "waybill/core/topology.h"

namespace waybill::validation {
namespace {

bool check_sizes(const SparseMetadata& m, const char* name, Findings& findings) {
  if (m.world_size < 1 || m.world_size > max_world_size) {
    findings.add(FindingKind::shape, name, "world_size", {}, m.world_size,
                 concat("1..", max_world_size));
    return false;
  }
  if (m.num_entries() > INT32_MAX) {
    findings.add(FindingKind::shape, name, "seq_len", {}, concat(m.num_entries(), " entries"),
                 "at most 2^31 - 1");
    return false;
  }
  const bool entries_ok =
      check_offsets(name, "rank_offsets", m.rank_offsets, m.world_size, m.num_entries(), findings);
  if (m.dst_offset.size() != m.dst_rank.size()) {
    findings.add(FindingKind::shape, name, "dst_offset", {}, concat(m.dst_offset.size(), " values"),
                 concat(m.num_destinations(), ", as dst_rank"));
    return false;
  }
  if (m.copy_offsets.empty()) {
    if (m.num_destinations() == m.num_entries()) return entries_ok;
    findings.add(FindingKind::shape, name, "dst_rank", {}, concat(m.num_destinations(), " copies"),
                 concat(m.num_entries(), ", one per entry"));
    return false;
  }
  return check_offsets(name, "copy_offsets", m.copy_offsets, m.num_entries(), m.num_destinations(),
                       findings) &&
         entries_ok;
}

/// Whether all values lie in 0..limit. Without branches, so that the compiler can use vectors.
template <class Values>
bool all_within(const Values& values, std::uint64_t limit) {
  using Unsigned = std::make_unsigned_t<typename Values::value_type>;
  bool beyond = false;
  for (const auto value : values) beyond |= static_cast<Unsigned>(value) > limit;
  return !beyond;
}

/// Whether every entry has as many copies as it may have: exactly one in a reverse table, and in a
/// forward table at least one if it has rows.
bool copies_fit(const SendTable& table) {
  if (table.copy_offsets.empty()) return true;
  bool fit = true;
  for (std::int64_t i = 0; i < table.num_entries(); ++i) {
    const std::int64_t copies = table.destination_begin(i + 1) - table.destination_begin(i);
    fit &= table.reverse ? copies == 1 : copies > 0 || table.entries[i].len == 0;
  }
  return fit;
}

[[gnu::cold]] bool check_lengths(const SendTable& table, Findings& findings) {
  bool safe = true;
  for (std::int64_t i = 0; i < table.num_entries(); ++i) {
    const std::int64_t len = table.entries[i].len;
    if (0 <= len && len <= max_offset) [[likely]]
      continue;
    safe = false;
    findings.add(len < 0 ? FindingKind::negative : FindingKind::bounds, table.name, "seq_len",
                 table.place(i), len, concat("0..", max_offset));
  }
  return safe;
}

[[gnu::cold]] bool check_copies(const SendTable& table, Findings& findings) {
  bool safe = true;
  for (std::int64_t i = 0; i < table.num_entries(); ++i) {
    const std::int64_t first = table.destination_begin(i);
    const std::int64_t last = table.destination_begin(i + 1);
    if (last == first && table.entries[i].len > 0) {
      // Safe to go on: the rows stay behind.
      findings.add(FindingKind::undispatched, table.name, "dst_rank", table.place(i),
                   concat("no destination for ", table.entries[i].len, " rows"), "one");
    }
    if (table.reverse && last != first + 1) {
      findings.add(FindingKind::shape, table.name, "copy_offsets", table.place(i),
                   concat(last - first, " copies"), "1 in a reverse table");
      safe = false;
    }
    for (std::int64_t c = first; c < last; ++c) {
      const std::int32_t dst = table.dst_rank[c];
      const std::int64_t row = table.dst_row[c];
      if (dst < 0 || dst >= table.world_size) [[unlikely]] {
        safe = false;
        findings.add(FindingKind::rank_range, table.name, "dst_rank", table.place(i, c - first),
                     dst, concat("0..", table.world_size - 1));
      }
      if (row < 0 || row > max_offset) [[unlikely]] {
        safe = false;
        findings.add(row < 0 ? FindingKind::negative : FindingKind::bounds, table.name,
                     "dst_offset", table.place(i, c - first), row, concat("0..", max_offset));
      }
    }
  }
  return safe;
}

}  // namespace

std::optional<SendTable> load(const SparseMetadata& m, const char* name, TableDirection direction,
                              Findings& findings) {
  if (!check_sizes(m, name, findings)) return std::nullopt;
  SendTable table;
  table.name = name;
  table.world_size = m.world_size;
  table.rank_offsets = m.rank_offsets;
  table.copy_offsets = m.copy_offsets;
  table.dst_rank = m.dst_rank;
  table.dst_row = m.dst_offset;
  table.one_copy = m.copy_offsets.empty();
  table.reverse = direction == TableDirection::reverse;
  table.entries.resize(m.seq_len.size());
  for (std::int32_t r = 0; r < m.world_size; ++r) {
    const std::int64_t first = m.rank_offsets[r];
    for (std::int64_t entry = first; entry < m.rank_offsets[r + 1]; ++entry) {
      table.entries[entry] = {.len = m.seq_len[entry],
                              .begin = 0,
                              .rank = r,
                              .shard = static_cast<std::int32_t>(entry - first)};
    }
  }
  const bool in_range = all_within(m.seq_len, max_offset) && all_within(m.dst_offset, max_offset) &&
                        all_within(m.dst_rank, static_cast<std::uint64_t>(m.world_size) - 1) &&
                        copies_fit(table);
  if (!in_range) [[unlikely]] {
    const bool lengths_ok = check_lengths(table, findings);
    if (!check_copies(table, findings) || !lengths_ok) return std::nullopt;
  }
  if (!sum_lengths(table, findings)) return std::nullopt;
  return table;
}

}  // namespace waybill::validation
