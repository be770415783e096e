#include <algorithm>
#include <type_traits>

#include "checks.h"
#include "waybill/core/dtype.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/topology.h"

namespace waybill::validation {

IndexReader::IndexReader(const IndexArray& array) {
  if (array.dtype() == DType::int64) {
    values_ = array.i64();
    return;
  }
  if (array.dtype() == DType::uint64) {
    const auto* first = static_cast<const std::uint64_t*>(array.data());
    converted_.resize(array.size());
    std::transform(first, first + array.size(), converted_.begin(), [](std::uint64_t value) {
      return static_cast<std::int64_t>(std::min<std::uint64_t>(value, INT64_MAX));
    });
  } else {
    converted_ = array.to_vector();
  }
  values_ = converted_;
}

bool check_size(const char* table, const char* field, std::int64_t got, std::int64_t expected,
                Findings& findings, const char* why) {
  if (got == expected) return true;
  findings.add(FindingKind::shape, table, field, {}, concat(got, " values"), concat(expected, why));
  return false;
}

bool check_extents(const char* table, std::int64_t world_size, const char* field, std::int64_t size,
                   const char* what, Findings& findings) {
  if (world_size < 1 || world_size > max_world_size) {
    findings.add(FindingKind::shape, table, "world_size", {}, world_size,
                 concat("1..", max_world_size));
    return false;
  }
  if (size <= INT32_MAX) return true;
  findings.add(FindingKind::shape, table, field, {}, concat(size, " ", what), "at most 2^31 - 1");
  return false;
}

bool check_rows(const char* table, const char* field, const Place& place, std::int64_t rows,
                Findings& findings) {
  if (0 <= rows && rows <= max_offset) [[likely]]
    return true;
  findings.add(rows < 0 ? FindingKind::negative : FindingKind::bounds, table, field, place, rows,
               concat("0..", max_offset));
  return false;
}

bool check_shape(const char* table, const char* field, const IndexArray& array,
                 const Shape& expected, Findings& findings) {
  if (array.shape() == expected) return true;
  findings.add(FindingKind::shape, table, field, {}, to_string(array.shape()), to_string(expected));
  return false;
}

void check_dtype(const char* table, const char* field, const IndexArray& array, DType expected,
                 const char* why, Findings& findings) {
  if (array.dtype() == expected) return;
  findings.add(FindingKind::normalization, table, field, {}, array.dtype(),
               concat(expected, " (", why, ")"));
}

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
                                                             : table.destination_end(entry) -
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

namespace {

bool check_shapes(const Metadata& m, const char* name, bool is_reverse, Findings& findings) {
  if (m.seq_len.ndim() != 2) {
    findings.add(FindingKind::shape, name, "seq_len", {}, to_string(m.seq_len.shape()),
                 "[W, S]; the slice of one rank cannot be checked alone");
    return false;
  }
  const std::int64_t world = m.seq_len.dim(0);
  if (world < 1 || world > max_world_size || m.seq_len.size() > INT32_MAX) {
    findings.add(FindingKind::shape, name, "seq_len", {}, to_string(m.seq_len.shape()),
                 concat("a world_size of 1..", max_world_size, ", below 2^31 shards"));
    return false;
  }
  Shape entries = m.seq_len.shape();
  if (m.has_copies() && !is_reverse) entries.push_back(m.dst_rank.dim(-1));
  bool ok = check_shape(name, "dst_rank", m.dst_rank, entries, findings);
  ok &= check_shape(name, "dst_offset", m.dst_offset, entries, findings);
  if (m.world_size && *m.world_size != world) {
    findings.add(FindingKind::shape, name, "world_size", {}, *m.world_size,
                 concat(world, ", the first extent of seq_len"));
  }
  return ok;
}

void check_dtypes(const Metadata& m, const char* name, Findings& findings) {
  const bool device = m.normalized;
  const char* why = device ? "normalized" : "not normalized";
  const auto check = [&](const char* field, const IndexArray& array, DType device_type,
                         DType host_type = DType::int64) {
    check_dtype(name, field, array, device ? device_type : host_type, why, findings);
  };
  check("dst_rank", m.dst_rank, DType::int32);
  check("dst_offset", m.dst_offset, DType::uint32);
  check("seq_len", m.seq_len, DType::uint32);
  check("num_recv_tokens", m.num_recv_tokens, DType::uint64);
  if (m.num_seqs) check("num_seqs", *m.num_seqs, DType::int32);
  if (m.seq_recv_mask) {
    check("seq_recv_mask", *m.seq_recv_mask, DType::uint32, DType::boolean);
  }
  if (m.recv_seq_lens) check("recv_seq_lens", *m.recv_seq_lens, DType::uint32);
}

/// Reads one copy of a dense table. False: not safe to go on.
bool read_copy(std::int64_t dst, std::int64_t row, const Place& place, SendTable& table,
               Findings& findings) {
  if (dst == -1) {
    if (row != 0) {
      findings.add(FindingKind::padding, table.name, "dst_offset", place, row,
                   "0, as dst_rank is -1");
    }
    return true;
  }
  if (dst < -1 || dst >= table.world_size) {
    findings.add(FindingKind::rank_range, table.name, "dst_rank", place, dst,
                 concat("-1 (none) or 0..", table.world_size - 1));
    return false;
  }
  table.own_dst_rank.push_back(static_cast<std::int32_t>(dst));
  table.own_dst_row.push_back(row);
  return check_rows(table.name, "dst_offset", place, row, findings);
}

/// Reads the entries of a dense table. False: not safe to go on.
bool read_entries(const Metadata& m, SendTable& table, Findings& findings) {
  const IndexReader lens(m.seq_len), ranks(m.dst_rank), offsets(m.dst_offset);
  const std::int64_t num_shards = m.seq_len.dim(1);
  const std::int64_t per_entry = m.has_copies() ? m.dst_rank.dim(-1) : 1;
  bool safe = true;
  table.entries.resize(m.seq_len.size());
  table.own_copy_offsets.assign(1, 0);
  for (std::int64_t r = 0; r <= table.world_size; ++r) table.rank_offsets.push_back(r * num_shards);
  for (std::int64_t entry = 0; entry < table.num_entries(); ++entry) {
    const std::int64_t len = lens[entry];
    table.entries[entry] = {.len = len,
                            .begin = 0,
                            .rank = static_cast<std::int32_t>(entry / num_shards),
                            .shard = static_cast<std::int32_t>(entry % num_shards)};
    safe &= check_rows(table.name, "seq_len", table.place(entry), len, findings);
    for (std::int64_t k = 0; k < per_entry; ++k) {
      const std::int64_t at = entry * per_entry + k;
      const Place place{
          .rank = entry / num_shards, .shard = entry % num_shards, .copy = table.reverse ? -1 : k};
      safe &= read_copy(ranks[at], offsets[at], place, table, findings);
      table.own_copy_slot.resize(table.own_dst_rank.size(), static_cast<std::int32_t>(k));
    }
    const bool is_sent = std::ssize(table.own_dst_rank) > table.own_copy_offsets.back();
    table.own_copy_offsets.push_back(std::ssize(table.own_dst_rank));
    if (is_sent || len <= 0 || !safe) continue;
    if (table.reverse) {
      findings.add(FindingKind::padding, table.name, "seq_len", table.place(entry), len,
                   "0, as dst_rank is -1");
    } else {
      findings.add(FindingKind::undispatched, table.name, "dst_rank", table.place(entry),
                   concat("no destination for ", len, " rows"), "one");
    }
  }
  table.copy_offsets = table.own_copy_offsets;
  table.dst_rank = table.own_dst_rank;
  table.dst_row = table.own_dst_row;
  table.copy_slot = table.own_copy_slot;
  return safe;
}

}  // namespace

std::optional<SendTable> load(const Metadata& m, const char* name, bool is_reverse,
                              Findings& findings) {
  if (!check_shapes(m, name, is_reverse, findings)) return std::nullopt;
  check_dtypes(m, name, findings);
  SendTable table;
  table.name = name;
  table.world_size = static_cast<std::int32_t>(m.seq_len.dim(0));
  table.one_copy = !m.has_copies();
  table.reverse = is_reverse;
  if (!read_entries(m, table, findings) || !sum_lengths(table, findings)) return std::nullopt;
  return table;
}

namespace {

bool check_sizes(const SparseMetadata& m, const char* name, Findings& findings) {
  if (!check_extents(name, m.world_size, "seq_len", m.num_entries(), "entries", findings))
    return false;
  const bool entries_ok =
      check_offsets(name, "rank_offsets", m.rank_offsets, m.world_size, m.num_entries(), findings);
  if (!check_size(name, "dst_offset", std::ssize(m.dst_offset), m.num_destinations(), findings,
                  ", as dst_rank"))
    return false;
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
    const std::int64_t copies = table.destination_end(i) - table.destination_begin(i);
    fit &= table.reverse ? copies == 1 : copies > 0 || table.entries[i].len == 0;
  }
  return fit;
}

[[gnu::cold]] bool check_lengths(const SendTable& table, Findings& findings) {
  bool safe = true;
  for (std::int64_t i = 0; i < table.num_entries(); ++i) {
    safe &= check_rows(table.name, "seq_len", table.place(i), table.entries[i].len, findings);
  }
  return safe;
}

[[gnu::cold]] bool check_copies(const SendTable& table, Findings& findings) {
  bool safe = true;
  for (std::int64_t i = 0; i < table.num_entries(); ++i) {
    const std::int64_t first = table.destination_begin(i);
    const std::int64_t last = table.destination_end(i);
    if (last == first && table.entries[i].len > 0) {
      // Safe to go on: the rows stay at home.
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
      safe &= check_rows(table.name, "dst_offset", table.place(i, c - first), row, findings);
    }
  }
  return safe;
}

}  // namespace

std::optional<SendTable> load(const SparseMetadata& m, const char* name, bool is_reverse,
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
  table.reverse = is_reverse;
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
