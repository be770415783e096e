#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "findings.h"
#include "waybill/core/table_allocator.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/sparse_metadata.h"

namespace waybill::validation {

/// No buffer has more rows, and no offset may be larger.
inline constexpr std::int64_t max_offset = std::int64_t{1} << 62;

/// The most rows that the lengths of a plan or a table may add up to.
inline constexpr std::int64_t max_total_rows = std::int64_t{1} << 40;

/// What the checks ask of a shard.
struct Entry {
  std::int64_t len;
  std::int64_t begin;  ///< first row on its rank
  std::int32_t rank;   ///< sending rank
  std::int32_t shard;  ///< place among the entries of its rank
};

enum class TableDirection { forward, reverse };

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

  // What the spans above look at where the table is not sparse already.
  std::vector<std::int64_t> own_copy_offsets;
  std::vector<std::int32_t> own_dst_rank;
  std::vector<std::int64_t> own_dst_row;
  std::vector<std::int32_t> own_copy_slot;
};

/// Checks sizes, padding and ranges. Nothing when it is not safe to go on; the findings say why.
/// The table borrows from `metadata`.
[[nodiscard]] std::optional<SendTable> load(const SparseMetadata& metadata, const char* name,
                                            TableDirection direction, Findings& findings);
[[nodiscard]] std::optional<SendTable> load(const Metadata& metadata, const char* name,
                                            TableDirection direction, Findings& findings);

/// Fills begin and rank_rows from the lengths, which are >= 0. False: some sum is too large, which
/// is a finding.
[[nodiscard]] bool sum_lengths(SendTable& table, Findings& findings);

/// offsets[0] = 0, never falling, offsets[n] = size. False: it is not so, which is a finding.
[[nodiscard]] bool check_offsets(const char* table, const char* field,
                                 std::span<const std::int64_t> offsets, std::int64_t num_parts,
                                 std::int64_t size, Findings& findings);

}  // namespace waybill::validation
