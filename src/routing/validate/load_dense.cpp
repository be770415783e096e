#include "index_reader.h"
#include "send_table.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/topology.h"

namespace waybill::validation {
namespace {

bool check_shapes(const Metadata& m, const char* name, TableDirection direction,
                  Findings& findings) {
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
  if (m.has_copies() && direction == TableDirection::forward) entries.push_back(m.dst_rank.dim(-1));
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

/// Reads the entries of one dense table into the entries and copies of a SendTable.
class DenseLoader {
 public:
  DenseLoader(const Metadata& m, SendTable& table, Findings& findings)
      : len_(m.seq_len),
        dst_(m.dst_rank),
        row_(m.dst_offset),
        per_entry_(m.has_copies() ? m.dst_rank.dim(-1) : 1),
        table_(table),
        findings_(findings) {}

  /// False: not safe to go on.
  bool run(std::int64_t num_shards) {
    const std::int64_t world = table_.world_size;
    table_.entries.resize(world * num_shards);
    table_.own_copy_offsets.assign(1, 0);
    for (std::int64_t r = 0; r <= world; ++r) table_.rank_offsets.push_back(r * num_shards);
    for (std::int64_t entry = 0; entry < world * num_shards; ++entry) {
      table_.entries[entry] = {.len = len_[entry],
                               .begin = 0,
                               .rank = static_cast<std::int32_t>(entry / num_shards),
                               .shard = static_cast<std::int32_t>(entry % num_shards)};
      read_entry(entry);
      table_.own_copy_offsets.push_back(std::ssize(table_.own_dst_rank));
    }
    table_.copy_offsets = table_.own_copy_offsets;
    table_.dst_rank = table_.own_dst_rank;
    table_.dst_row = table_.own_dst_row;
    table_.copy_slot = table_.own_copy_slot;
    return safe_;
  }

 private:
  void read_entry(std::int64_t entry) {
    const std::int64_t len = len_[entry];
    if (len < 0 || len > max_offset) {
      fail(len < 0 ? FindingKind::negative : FindingKind::bounds, "seq_len", table_.place(entry),
           len, concat("0..", max_offset));
    }
    const std::int64_t before = std::ssize(table_.own_dst_rank);
    for (std::int64_t k = 0; k < per_entry_; ++k) read_copy(entry, k);
    if (std::ssize(table_.own_dst_rank) > before || len <= 0 || !safe_) return;
    if (table_.reverse) {
      findings_.add(FindingKind::padding, table_.name, "seq_len", table_.place(entry), len,
                    "0, as dst_rank is -1");
    } else {
      findings_.add(FindingKind::undispatched, table_.name, "dst_rank", table_.place(entry),
                    concat("no destination for ", len, " rows"), "one");
    }
  }

  void read_copy(std::int64_t entry, std::int64_t k) {
    const std::int64_t dst = dst_[entry * per_entry_ + k];
    const std::int64_t row = row_[entry * per_entry_ + k];
    if (dst == -1) {
      if (row != 0) {
        findings_.add(FindingKind::padding, table_.name, "dst_offset", table_.place(entry, k), row,
                      "0, as dst_rank is -1");
      }
      return;
    }
    if (dst < -1 || dst >= table_.world_size) {
      fail(FindingKind::rank_range, "dst_rank", table_.place(entry, k), dst,
           concat("-1 (none) or 0..", table_.world_size - 1));
      return;
    }
    if (row < 0 || row > max_offset) {
      fail(row < 0 ? FindingKind::negative : FindingKind::bounds, "dst_offset",
           table_.place(entry, k), row, concat("0..", max_offset));
    }
    table_.own_dst_rank.push_back(static_cast<std::int32_t>(dst));
    table_.own_dst_row.push_back(row);
    table_.own_copy_slot.push_back(static_cast<std::int32_t>(k));
  }

  void fail(FindingKind kind, const char* field, Place place, std::int64_t got,
            const std::string& expected) {
    safe_ = false;
    findings_.add(kind, table_.name, field, place, got, expected);
  }

  IndexReader len_;
  IndexReader dst_;
  IndexReader row_;
  std::int64_t per_entry_;
  SendTable& table_;
  Findings& findings_;
  bool safe_ = true;
};

}  // namespace

std::optional<SendTable> load(const Metadata& m, const char* name, TableDirection direction,
                              Findings& findings) {
  if (!check_shapes(m, name, direction, findings)) return std::nullopt;
  check_dtypes(m, name, findings);
  SendTable table;
  table.name = name;
  table.world_size = static_cast<std::int32_t>(m.seq_len.dim(0));
  table.one_copy = !m.has_copies();
  table.reverse = direction == TableDirection::reverse;
  if (!DenseLoader(m, table, findings).run(m.seq_len.dim(1))) return std::nullopt;
  if (!sum_lengths(table, findings)) return std::nullopt;
  return table;
}

}  // namespace waybill::validation
