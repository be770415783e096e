#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "findings.h"
#include "waybill/core/index_array.h"
#include "waybill/core/table_allocator.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::validation {

/// The elements of an array of any dtype as int64, without copying where they are. Never throws
/// for a value: one over 2^63 - 1 reads as 2^63 - 1, which no check lets pass.
class IndexReader {
 public:
  explicit IndexReader(const IndexArray& array);
  [[nodiscard]] std::int64_t operator[](std::int64_t idx) const { return values_[idx]; }
  [[nodiscard]] std::span<const std::int64_t> span() const { return values_; }
  IndexReader(const IndexReader&) = delete;
  IndexReader& operator=(const IndexReader&) = delete;

 private:
  std::vector<std::int64_t> converted_;
  std::span<const std::int64_t> values_;
};

/// False, and a finding, unless a list has as many values as `expected`. @param why ends the text
[[nodiscard]] bool check_size(const char* table, const char* field, std::int64_t got,
                              std::int64_t expected, Findings& findings, const char* why = "");

/// False, and a finding, unless the world has a size that is possible, and `size` fits int32.
/// @param what `size` counts, in `field`
[[nodiscard]] bool check_extents(const char* table, std::int64_t world_size, const char* field,
                                 std::int64_t size, const char* what, Findings& findings);

/// False, and a finding, unless a length or an offset is in 0..max_offset.
[[nodiscard]] bool check_rows(const char* table, const char* field, const Place& place,
                              std::int64_t rows, Findings& findings);

/// False, and a finding, unless `array` has this shape.
[[nodiscard]] bool check_shape(const char* table, const char* field, const IndexArray& array,
                               const Shape& expected, Findings& findings);

/// A finding unless `array` has this dtype.
void check_dtype(const char* table, const char* field, const IndexArray& array, DType expected,
                 const char* why, Findings& findings);

/// No buffer has more rows, and no offset may be larger.
inline constexpr std::int64_t max_offset = std::int64_t{1} << 62;

/// The most rows that the lengths of a plan or a table may add up to.
inline constexpr std::int64_t max_total_rows = std::int64_t{1} << 40;

/// A shard as the checks see it.
struct Entry {
  std::int64_t len;
  std::int64_t begin;  ///< first row on its rank
  std::int32_t rank;   ///< sending rank
  std::int32_t shard;  ///< place among the entries of its rank
};

/// One direction of one tensor, dense or sparse, in the one form that the checks know. Loading
/// proves what they rely on: sizes agree, ranks are in the world, lengths and offsets are in
/// 0..max_offset, and so are the sums of lengths, copies included.
struct SendTable {
  const char* name = "";  ///< for findings
  std::int32_t world_size = 0;
  std::vector<std::int64_t> rank_offsets;      ///< [W + 1]: entries of each rank
  UninitializedVector<Entry> entries;          ///< padding of the dense form included
  std::vector<std::int64_t> rank_rows;         ///< [W]: rows that live on the rank
  std::span<const std::int64_t> copy_offsets;  ///< [entries + 1]; empty: one destination per entry
  std::span<const std::int32_t> dst_rank;      ///< [destinations]
  std::span<const std::int64_t> dst_row;       ///< [destinations]
  std::span<const std::int32_t> copy_slot;  ///< [destinations]; empty: the place within the entry
  bool one_copy = true;                     ///< the form has no copy axis
  bool reverse = false;

  [[nodiscard]] std::int64_t num_entries() const { return std::ssize(entries); }
  [[nodiscard]] std::int64_t num_destinations() const { return std::ssize(dst_rank); }
  [[nodiscard]] std::int64_t destination_begin(std::int64_t entry) const {
    return copy_offsets.empty() ? entry : copy_offsets[entry];
  }
  [[nodiscard]] std::int64_t destination_end(std::int64_t entry) const {
    return destination_begin(entry + 1);
  }
  [[nodiscard]] std::int64_t slot(std::int64_t entry, std::int64_t copy) const {
    return copy_slot.empty() ? copy - destination_begin(entry) : copy_slot[copy];
  }
  [[nodiscard]] Place place(std::int64_t entry, std::int64_t slot_idx = -1) const {
    const Entry& info = entries[entry];
    return {.rank = info.rank, .shard = info.shard, .copy = reverse ? -1 : slot_idx};
  }

  SendTable() = default;
  SendTable(SendTable&&) = default;
  SendTable& operator=(SendTable&&) = default;
  SendTable(const SendTable&) = delete;  // the spans would look at the other's vectors
  SendTable& operator=(const SendTable&) = delete;
  ~SendTable() = default;

  // The spans above look at these where the table is not sparse already.
  std::vector<std::int64_t> own_copy_offsets;
  std::vector<std::int32_t> own_dst_rank;
  std::vector<std::int64_t> own_dst_row;
  std::vector<std::int32_t> own_copy_slot;
};

/// Checks sizes, padding and ranges. Nothing when it is not safe to go on; the findings say why.
/// The table borrows from `metadata`.
[[nodiscard]] std::optional<SendTable> load(const SparseMetadata& metadata, const char* name,
                                            bool is_reverse, Findings& findings);
[[nodiscard]] std::optional<SendTable> load(const Metadata& metadata, const char* name,
                                            bool is_reverse, Findings& findings);

/// Fills begin and rank_rows from the lengths, which are >= 0. False: some sum is too large, which
/// is a finding.
[[nodiscard]] bool sum_lengths(SendTable& table, Findings& findings);

/// offsets[0] = 0, never falling, offsets[n] = size. False: it is not so, which is a finding.
[[nodiscard]] bool check_offsets(const char* table, const char* field,
                                 std::span<const std::int64_t> offsets, std::int64_t num_parts,
                                 std::int64_t size, Findings& findings);

/// A copy, seen from where it lands.
struct Arrival {
  std::int64_t row;    ///< first row in the destination's buffer
  std::int32_t entry;  ///< entry of the table
  std::int32_t slot;   ///< which copy of the entry
};

/// The copies of a table by destination, in the order of their rows there. At the same row, those
/// without rows come first; among these the order is the global one.
struct Arrivals {
  std::vector<std::int64_t> offsets;  ///< [W + 1]
  UninitializedVector<Arrival> list;  ///< [destinations]
  std::vector<std::int64_t> rows;     ///< [W]: sum of the lengths
  /// [W]: 1 where the rows are without gap or overlap. Before check_tiling only of those whose
  /// rows come in the global order.
  std::vector<std::uint8_t> tiled;

  [[nodiscard]] std::span<const Arrival> of(std::int32_t rank) const {
    return {list.data() + offsets[rank], list.data() + offsets[rank + 1]};
  }
};

/// Counting sort by rank. Where the global order is not the order of rows: a radix sort of that
/// rank's copies. Linear.
[[nodiscard]] Arrivals sort_arrivals(const SendTable& table);

/// Every buffer is written exactly once, from row 0 without gap or overlap.
void check_tiling(const SendTable& table, Arrivals& arrivals, Findings& findings);

/// No buffer is larger than `capacity` rows; -1: any.
void check_capacity(const SendTable& table, const Arrivals& arrivals, std::int64_t capacity,
                    Findings& findings);

/// The reverse table sends back what arrived, in the order of rows, to `copy * T + begin`.
void check_reverse(const SendTable& forward, const Arrivals& arrivals, const SendTable& reverse,
                   Findings& findings);

/// The reverse of a table with copies, by itself: what arrives at a home rank is exactly the copies
/// that its seq_recv_mask names, each at `copy * T + begin`. After the table's load as reverse.
void check_planes(const Metadata& reverse, const SendTable& table, const Arrivals& arrivals,
                  Findings& findings);

/// The kind of a wrong number of rows or tokens.
[[nodiscard]] inline FindingKind count_kind(std::int64_t got) {
  return got < 0 ? FindingKind::negative : FindingKind::count;
}

/// The counts of received rows agree with the entries: rows by pair of ranks, totals, and num_seqs
/// of the dense form. `received_rows` [W] is the sum of the lengths by destination. Where the
/// arrivals are known they make the check of the sparse form faster; otherwise null.
/// @param counts_copies a table of KV or of copies: its num_seqs counts either the entries with
///   rows or all that are sent; that of Q those with rows
void check_counts(const SparseMetadata& metadata, const SendTable& table,
                  std::span<const std::int64_t> received_rows, const Arrivals* arrivals,
                  bool counts_copies, Findings& findings);
void check_counts(const Metadata& metadata, const SendTable& table,
                  std::span<const std::int64_t> received_rows, const Arrivals* arrivals,
                  bool counts_copies, Findings& findings);

/// Sum of the lengths by destination, where there are no arrivals to tell it. [W]
[[nodiscard]] std::vector<std::int64_t> received_rows(const SendTable& table);

/// seq_recv_mask and recv_seq_lens: in the reverse of a forward table with copies only, and there
/// they repeat which copies and lengths went out.
void check_masks(const Metadata& fwd, const Metadata& rev, const SendTable& forward,
                 const char* reverse_name, Findings& findings);
inline void check_masks(const SparseMetadata&, const SparseMetadata&, const SendTable&, const char*,
                        Findings&) {}  // the sparse form has none

/// Checks every rule that QkvPlan states. False: an index of it must not be built.
[[nodiscard]] bool check_plan(const QkvPlan& plan, Findings& findings);

/// A plan seen from its documents and from the attending ranks. A place is an index into
/// doc_shards: documents back to back, each in the order of its tokens.
struct PlanIndex {
  const QkvPlan* plan = nullptr;
  UninitializedVector<std::int32_t> document;  ///< [N] by place
  std::vector<std::int32_t> home;              ///< [N] by shard: rank that holds it
  UninitializedVector<std::int32_t> kv_first;  ///< [N] by place: place of the first needed KV shard
  UninitializedVector<std::int32_t> kv_last;   ///< [N] by place: place of the last needed KV shard
  UninitializedVector<std::int32_t> first_query;  ///< [N] by place: place of the first to need it
  UninitializedVector<std::int64_t> rows_before;  ///< [N + 1] by place: rows of all places before
  std::vector<std::int64_t> rank_offsets;         ///< [W + 1]: queries by attending rank
  /// [N]: places of the queries of each rank, in the order of the groups of its KV buffer.
  UninitializedVector<std::int32_t> queries;

  [[nodiscard]] std::int32_t shard(std::int64_t place) const { return plan->doc_shards[place]; }
  /// The entry of a shard in a forward table.
  [[nodiscard]] std::int64_t entry_of(std::int64_t shard, const SendTable& table) const {
    const std::int32_t rank = home[shard];
    return table.rank_offsets[rank] + shard - plan->rank_shard_offsets[rank];
  }
  [[nodiscard]] std::int64_t rows(std::int64_t first, std::int64_t last) const {
    return rows_before[last + 1] - rows_before[first];
  }
  [[nodiscard]] std::span<const std::int32_t> queries_of(std::int32_t rank) const {
    return {queries.data() + rank_offsets[rank], queries.data() + rank_offsets[rank + 1]};
  }
  /// "shard 3 of rank 5"
  [[nodiscard]] std::string describe(std::int64_t place) const;
};

[[nodiscard]] PlanIndex index_plan(const QkvPlan& plan);

/// The KV rows that one query reads, and those that it adds to the buffer of its rank.
struct KvStep {
  std::int32_t query;      ///< place
  std::int64_t kv_row;     ///< first row of its context in the buffer
  std::int64_t kv_len;     ///< rows of its context
  std::int64_t new_first;  ///< places new_first..new_last follow in the buffer; none if it is less
  std::int64_t new_last;
};

/// Walks one rank's KV buffer as it must be, query by query in the order of the groups, and calls
/// step(const KvStep&). Returns the rows of the buffer.
template <class Step>
std::int64_t walk_kv(const PlanIndex& index, std::int32_t rank, Step&& step) {
  const bool share = index.plan->kv_layout == KvLayout::per_rank;
  std::int32_t document = -1;
  std::int64_t row = 0;           // rows of the buffer so far
  std::int64_t interval = 0;      // first place of the current run of places in the buffer
  std::int64_t interval_row = 0;  // its row
  std::int64_t next = 0;          // the place after that run
  for (const std::int32_t query : index.queries_of(rank)) {
    const std::int64_t first = index.kv_first[query];
    const std::int64_t last = index.kv_last[query];
    // Along a document ranges never move back, so a run is continued or left for good.
    if (!share || index.document[query] != document || first > next) {
      document = index.document[query];
      interval = first;
      interval_row = row;
      next = first;
    }
    step(KvStep{.query = query,
                .kv_row = add_rows(interval_row, index.rows(interval, first - 1)),
                .kv_len = index.rows(first, last),
                .new_first = next,
                .new_last = last});
    row = add_rows(interval_row, index.rows(interval, last));
    next = last + 1;
  }
  return row;
}

/// No rank needs more rows than the capacities; -1: any.
void check_plan_capacity(const PlanIndex& index, const ValidateOptions& options,
                         Findings& findings);

/// False, and a finding, unless the entries of a forward table are the shards of the plan: shard j
/// of a rank is its entry j, with the same length; further entries are padding.
[[nodiscard]] bool check_entries(const SendTable& table, const PlanIndex& index,
                                 Findings& findings);

/// Queries go where the plan says, and land in the global order. After check_lines and
/// check_tiling.
void check_queries(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                   Findings& findings);

/// Every query meets exactly the KV shards of its range, in document order, and no
/// buffer holds others. After check_lines.
void check_causality(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                     Findings& findings);

/// KvLayout::per_rank: the copies of a shard are numbered by the last query of the document on
/// the rank that holds them, last first. After check_lines.
void check_copy_order(const SendTable& table, const PlanIndex& index, Findings& findings);

/// The attention layout of a plan, sparse and dense.
void check_attention(const SparseAttnLayout& attention, const PlanIndex& index, Findings& findings);
void check_attention(const AttnLayout& attention, const PlanIndex& index, Findings& findings);

}  // namespace waybill::validation
