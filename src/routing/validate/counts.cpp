#include "checks.h"

namespace waybill::validation {
namespace {

void check_matrix(const Metadata& m, const SendTable& table,
                  std::span<const std::int64_t> received_rows, Findings& findings) {
  const std::int64_t world = table.world_size;
  if (!m.has_counts()) {
    findings.add(FindingKind::shape, table.name, "num_recv_tokens", {}, "none",
                 concat("counts of shape ", to_string(Shape{world, world + 1})));
    return;
  }
  if (!check_shape(table.name, "num_recv_tokens", m.num_recv_tokens, {world, world + 1},
                   findings)) {
    return;
  }
  std::vector<std::int64_t> expected(world * (world + 1));
  for (std::int64_t entry = 0; entry < table.num_entries(); ++entry) {
    const Entry& info = table.entries[entry];
    for (std::int64_t c = table.destination_begin(entry); c < table.destination_end(entry); ++c) {
      expected[table.dst_rank[c] * (world + 1) + info.rank] += info.len;
    }
  }
  for (std::int64_t r = 0; r < world; ++r) {
    expected[r * (world + 1) + world] = received_rows[r];
  }
  const IndexReader cells(m.num_recv_tokens);
  for (std::int64_t cell = 0; cell < std::ssize(expected) && !findings.full(); ++cell) {
    const std::int64_t got = cells[cell];
    if (got == expected[cell]) [[likely]]
      continue;
    const std::int64_t src = cell % (world + 1);
    const std::string from = src == world ? " rows in all" : concat(" rows from rank ", src);
    findings.add(count_kind(got), table.name, "num_recv_tokens", {.rank = cell / (world + 1)},
                 concat(got, from), concat(expected[cell], from));
  }
}

void check_totals(const Metadata& m, const SendTable& table,
                  std::span<const std::int64_t> received_rows, Findings& findings) {
  const std::vector<std::int64_t>& totals = m.num_total_recv_tokens;
  if (totals.empty()) return;  // not known
  if (!check_size(table.name, "num_total_recv_tokens", std::ssize(totals), table.world_size,
                  findings))
    return;
  for (std::int32_t r = 0; r < table.world_size; ++r) {
    if (totals[r] == received_rows[r]) continue;
    findings.add(count_kind(totals[r]), table.name, "num_total_recv_tokens", {.rank = r}, totals[r],
                 received_rows[r]);
  }
}

void check_num_seqs(const Metadata& m, const SendTable& table, bool counts_copies,
                    Findings& findings) {
  if (!m.num_seqs) return;
  const bool column = m.num_seqs->shape() == Shape{table.world_size, 1};
  if (!column && !check_shape(table.name, "num_seqs", *m.num_seqs, {table.world_size}, findings)) {
    return;
  }
  const IndexReader num_seqs(*m.num_seqs);
  for (std::int32_t r = 0; r < table.world_size; ++r) {
    std::int64_t with_rows = 0;
    std::int64_t with_copies = 0;
    for (std::int64_t i = table.rank_offsets[r]; i < table.rank_offsets[r + 1]; ++i) {
      const bool rows = table.entries[i].len > 0;
      with_rows += rows ? 1 : 0;
      with_copies += rows || table.destination_end(i) > table.destination_begin(i) ? 1 : 0;
    }
    const std::int64_t got = num_seqs[r];
    if (got == with_rows) continue;
    if (counts_copies && got == with_copies) continue;
    findings.add(count_kind(got), table.name, "num_seqs", {.rank = r}, got, with_rows);
  }
}

/// A finding unless the array is there exactly when it is wanted. True: it is there, as it should.
bool check_presence(const char* name, const char* field, const std::optional<IndexArray>& array,
                    bool wanted, Findings& findings) {
  if (array.has_value() == wanted) return wanted;
  findings.add(FindingKind::mask, name, field, {}, wanted ? "none" : "an array",
               wanted ? "an array, as forward has copies" : "none: no shard has copies");
  return false;
}

}  // namespace

void check_counts(const Metadata& metadata, const SendTable& table,
                  std::span<const std::int64_t> received_rows, const Arrivals* /*arrivals*/,
                  bool counts_copies, Findings& findings) {
  check_matrix(metadata, table, received_rows, findings);
  check_totals(metadata, table, received_rows, findings);
  check_num_seqs(metadata, table, counts_copies, findings);
}

void check_masks(const Metadata& fwd, const Metadata& rev, const SendTable& forward,
                 const char* reverse_name, Findings& findings) {
  const char* mask = "seq_recv_mask";
  const char* lens = "recv_seq_lens";
  check_presence(forward.name, mask, fwd.seq_recv_mask, false, findings);
  check_presence(forward.name, lens, fwd.recv_seq_lens, false, findings);
  const bool wanted = fwd.has_copies();
  if (check_presence(reverse_name, mask, rev.seq_recv_mask, wanted, findings) &&
      check_shape(reverse_name, mask, *rev.seq_recv_mask, fwd.dst_rank.shape(), findings)) {
    const IndexReader bits(*rev.seq_recv_mask);
    const IndexReader dst(fwd.dst_rank);
    const std::int64_t copies = fwd.dst_rank.dim(-1);
    for (std::int64_t i = 0; i < fwd.dst_rank.size() && !findings.full(); ++i) {
      if (bits[i] == (dst[i] >= 0 ? 1 : 0)) continue;
      Place place = forward.place(i / copies, i % copies);
      findings.add(FindingKind::mask, reverse_name, mask, place, bits[i], dst[i] >= 0 ? 1 : 0);
    }
  }
  if (check_presence(reverse_name, lens, rev.recv_seq_lens, wanted, findings) &&
      check_shape(reverse_name, lens, *rev.recv_seq_lens, fwd.seq_len.shape(), findings)) {
    const IndexReader got(*rev.recv_seq_lens);
    for (std::int64_t entry = 0; entry < forward.num_entries() && !findings.full(); ++entry) {
      if (got[entry] == forward.entries[entry].len) continue;
      findings.add(FindingKind::mask, reverse_name, lens, forward.place(entry), got[entry],
                   forward.entries[entry].len);
    }
  }
}

namespace {

std::string from_rank(std::int64_t rows, std::int64_t src) {
  return concat(rows, " rows from rank ", src);
}

bool check_pairs(const RecvCounts& recv, const SendTable& table, Findings& findings) {
  const std::int32_t world = table.world_size;
  const std::int64_t num_pairs = std::ssize(recv.src_rank);
  bool ok = check_offsets(table.name, "recv.offsets", recv.offsets, world, num_pairs, findings);
  ok &= check_size(table.name, "recv.tokens", std::ssize(recv.tokens), num_pairs, findings,
                   ", as recv.src_rank");
  ok &= check_size(table.name, "recv.total", std::ssize(recv.total), world, findings);
  if (!ok) return false;
  for (std::int32_t r = 0; r < world; ++r) {
    std::int64_t before = -1;
    for (std::int64_t p = recv.offsets[r]; p < recv.offsets[r + 1]; ++p) {
      const std::int64_t src = recv.src_rank[p];
      if (before < src && src < world) [[likely]] {
        before = src;
        continue;
      }
      const bool in_world = 0 <= src && src < world;
      findings.add(in_world ? FindingKind::order : FindingKind::rank_range, table.name,
                   "recv.src_rank", {.rank = r}, src,
                   in_world ? concat("more than ", before, ", the one before it")
                            : concat("0..", world - 1));
      ok = false;
    }
  }
  return ok;
}

/// Whether the pairs are those of the arrivals, receiver by receiver.
bool pairs_match(const RecvCounts& recv, const SendTable& table, const Arrivals& arrivals) {
  std::vector<std::int64_t> rows(table.world_size);  // rows of the current receiver, by sender
  bool same = true;
  for (std::int32_t r = 0; r < table.world_size; ++r) {
    for (const Arrival& a : arrivals.of(r)) {
      const Entry& entry = table.entries[a.entry];
      rows[entry.rank] += entry.len;
    }
    std::int64_t announced = 0;
    for (std::int64_t p = recv.offsets[r]; p < recv.offsets[r + 1]; ++p) {
      std::int64_t& sent = rows[recv.src_rank[p]];
      same &= sent > 0 && recv.tokens[p] == sent;
      announced += std::exchange(sent, 0);
    }
    // No sender is left out exactly when the pairs make up all rows.
    same &= announced == arrivals.rows[r] && recv.total[r] == announced;
    if (!same) return false;
  }
  return true;
}

/// Rows of each pair of `recv`, by one walk in the global order: the sending ranks of a receiver
/// come in ascending order, so one position a receiver suffices.
std::vector<std::int64_t> rows_of_pairs(const RecvCounts& recv, const SendTable& table,
                                        Findings& findings) {
  std::vector<std::int64_t> rows(recv.src_rank.size());
  std::vector<std::int64_t> position(recv.offsets.begin(), recv.offsets.end() - 1);
  std::vector<std::int32_t> reported(position.size(), -1);
  for (std::int64_t entry = 0; entry < table.num_entries(); ++entry) {
    const Entry& info = table.entries[entry];
    if (info.len == 0) continue;
    for (std::int64_t c = table.destination_begin(entry); c < table.destination_end(entry); ++c) {
      const std::size_t r = table.dst_rank[c];
      std::int64_t& p = position[r];
      while (p < recv.offsets[r + 1] && recv.src_rank[p] < info.rank) ++p;
      if (p < recv.offsets[r + 1] && recv.src_rank[p] == info.rank) [[likely]] {
        rows[p] += info.len;
      } else if (reported[r] != info.rank) {
        reported[r] = info.rank;
        findings.add(FindingKind::count, table.name, "recv.src_rank", {.rank = table.dst_rank[c]},
                     concat("no rows from rank ", info.rank), "some, as it sends them");
      }
    }
  }
  return rows;
}

}  // namespace

void check_counts(const SparseMetadata& metadata, const SendTable& table,
                  std::span<const std::int64_t> received_rows, const Arrivals* arrivals,
                  bool /*counts_copies*/, Findings& findings) {
  const RecvCounts& recv = metadata.recv;
  if (!check_pairs(recv, table, findings)) return;
  if (arrivals != nullptr && pairs_match(recv, table, *arrivals)) [[likely]]
    return;
  const std::vector<std::int64_t> rows = rows_of_pairs(recv, table, findings);
  for (std::int32_t r = 0; r < table.world_size && !findings.full(); ++r) {
    for (std::int64_t p = recv.offsets[r]; p < recv.offsets[r + 1]; ++p) {
      const std::int64_t got = recv.tokens[p];
      if (got == rows[p] && got > 0) [[likely]]
        continue;
      const std::int64_t src = recv.src_rank[p];
      findings.add(count_kind(got), table.name, "recv.tokens", {.rank = r}, from_rank(got, src),
                   rows[p] == 0 ? "no such pair, as it sends nothing" : from_rank(rows[p], src));
    }
    if (recv.total[r] == received_rows[r]) [[likely]]
      continue;
    findings.add(count_kind(recv.total[r]), table.name, "recv.total", {.rank = r}, recv.total[r],
                 received_rows[r]);
  }
}

std::vector<std::int64_t> received_rows(const SendTable& table) {
  std::vector<std::int64_t> rows(table.world_size);
  for (std::int64_t entry = 0; entry < table.num_entries(); ++entry) {
    for (std::int64_t c = table.destination_begin(entry); c < table.destination_end(entry); ++c) {
      rows[table.dst_rank[c]] += table.entries[entry].len;
    }
  }
  return rows;
}

}  // namespace waybill::validation
