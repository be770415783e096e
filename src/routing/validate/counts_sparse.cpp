#include "counts.h"

namespace waybill::validation {
namespace {

std::string from_rank(std::int64_t rows, std::int64_t src) {
  return concat(rows, " rows from rank ", src);
}

bool check_pairs(const RecvCounts& recv, const SendTable& table, Findings& findings) {
  const std::int32_t world = table.world_size;
  const std::int64_t num_pairs = std::ssize(recv.src_rank);
  bool ok = check_offsets(table.name, "recv.offsets", recv.offsets, world, num_pairs, findings);
  if (std::ssize(recv.tokens) != num_pairs) {
    findings.add(FindingKind::shape, table.name, "recv.tokens", {},
                 concat(recv.tokens.size(), " values"), concat(num_pairs, ", as recv.src_rank"));
    ok = false;
  }
  if (std::ssize(recv.total) != world) {
    findings.add(FindingKind::shape, table.name, "recv.total", {},
                 concat(recv.total.size(), " values"), world);
    ok = false;
  }
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
  std::vector<std::int64_t> rows(table.world_size);  // of the current receiver, by sender
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
    for (std::int64_t c = table.destination_begin(entry); c < table.destination_begin(entry + 1);
         ++c) {
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
                  Findings& findings) {
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
    for (std::int64_t c = table.destination_begin(entry); c < table.destination_begin(entry + 1);
         ++c) {
      rows[table.dst_rank[c]] += table.entries[entry].len;
    }
  }
  return rows;
}

}  // namespace waybill::validation
