#include "planes.h"

#include "index_reader.h"

namespace waybill::validation {
namespace {

/// What one home rank expects, copy by copy in the order of rows.
class PlanesOfRank {
 public:
  PlanesOfRank(const SendTable& table, std::span<const Arrival> arrived, std::int32_t rank,
               Findings& findings)
      : table_(table), arrived_(arrived), rank_(rank), findings_(findings) {
    skip_empty();
  }

  /// Rows `row..row + rows` are those of a used copy. False: they did not arrive; the rest of the
  /// rank would only repeat that.
  [[nodiscard]] bool expect(std::int64_t row, std::int64_t rows, Place place) {
    const bool has_arrived = next_ < std::ssize(arrived_) && arrived_[next_].row == row &&
                             table_.entries[arrived_[next_].entry].len == rows;
    if (has_arrived) {
      ++next_;
      skip_empty();
      return true;
    }
    findings_.add(FindingKind::coverage, table_.name, "dst_offset", place,
                  next_ < std::ssize(arrived_) ? arrived_text() : "nothing more arrives",
                  concat("rows ", row, "..", add_rows(row, rows), ", as seq_recv_mask says"));
    return false;
  }

  void expect_no_more() {
    if (next_ == std::ssize(arrived_)) return;
    findings_.add(FindingKind::mask, table_.name, "dst_offset", {.rank = rank_}, arrived_text(),
                  "nothing there: no copy in seq_recv_mask begins here");
  }

 private:
  void skip_empty() {
    while (next_ < std::ssize(arrived_) && table_.entries[arrived_[next_].entry].len == 0) {
      ++next_;
    }
  }

  [[nodiscard]] std::string arrived_text() const {
    const Arrival& a = arrived_[next_];
    const Entry& entry = table_.entries[a.entry];
    return concat("rows ", a.row, "..", add_rows(a.row, entry.len), " from rank ", entry.rank,
                  ", shard ", entry.shard);
  }

  const SendTable& table_;
  std::span<const Arrival> arrived_;
  std::int32_t rank_;
  Findings& findings_;
  std::int64_t next_ = 0;
};

}  // namespace

void check_planes(const Metadata& reverse, const SendTable& table, const Arrivals& arrivals,
                  Findings& findings) {
  const IndexArray& mask_array = *reverse.seq_recv_mask;
  const std::int64_t world = table.world_size;
  if (!reverse.recv_seq_lens || reverse.recv_seq_lens->ndim() != 2) {
    findings.add(FindingKind::mask, table.name, "recv_seq_lens", {}, "none of shape [W, S]",
                 "one, beside seq_recv_mask");
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
  for (std::int64_t r = 0; r < world && !findings.full(); ++r) {
    PlanesOfRank planes(table, arrivals.of(static_cast<std::int32_t>(r)),
                        static_cast<std::int32_t>(r), findings);
    std::int64_t row = 0;  // copy * T + begin, as the planes follow each other
    bool good = true;
    for (std::int64_t c = 0; c < copies && good; ++c) {
      for (std::int64_t s = 0; s < shards && good; ++s) {
        const std::int64_t rows = lens[r * shards + s];
        const bool used = mask[(r * shards + s) * copies + c] != 0;
        if (rows < 0) {
          findings.add(FindingKind::negative, table.name, "recv_seq_lens", {.rank = r, .shard = s},
                       rows, ">= 0");
          good = false;
        } else if (used && rows > 0) {
          good = planes.expect(row, rows, {.rank = r, .shard = s, .copy = c});
        }
        if (good) row = add_rows(row, rows);
      }
    }
    if (good) planes.expect_no_more();
  }
}

}  // namespace waybill::validation
