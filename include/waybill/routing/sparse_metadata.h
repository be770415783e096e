#pragma once

#include <cstdint>
#include <vector>

#include "waybill/core/table_allocator.h"
#include "waybill/routing/metadata.h"

namespace waybill {

/// Rows received, as (receiving rank, sending rank, tokens) in compressed rows: only pairs of ranks
/// that exchange something, so never W x W.
struct RecvCounts {
  std::vector<std::int64_t> offsets;   ///< [W + 1]: pairs of receiving rank r
  std::vector<std::int32_t> src_rank;  ///< ascending within a receiving rank
  std::vector<std::int64_t> tokens;    ///< > 0
  std::vector<std::int64_t> total;     ///< [W]: sum over the pairs of r

  friend bool operator==(const RecvCounts&, const RecvCounts&) = default;
};

/// Which rows of one tensor go where, in one direction: the sparse form of Metadata, without
/// padding. Linear in shards and destinations. Offsets and lengths are tokens.
///
/// Entries are shards, grouped by sending rank, in the order of their rows there: entry j of rank w
/// begins at the sum of seq_len over the rank's earlier entries.
struct SparseMetadata {
  std::int32_t world_size = 0;
  std::vector<std::int64_t> rank_offsets;     ///< [W + 1]: rank w sends entries [o[w], o[w + 1])
  UninitializedVector<std::int64_t> seq_len;  ///< [entries]
  /// [entries + 1]: destinations of an entry, into dst_rank and dst_offset; each gets a copy of its
  /// rows. Empty: exactly one per entry.
  UninitializedVector<std::int64_t> copy_offsets;
  UninitializedVector<std::int32_t> dst_rank;  ///< [destinations], 0..W-1
  UninitializedVector<std::int64_t>
      dst_offset;  ///< [destinations]: first row in the destination buffer
  RecvCounts recv;

  [[nodiscard]] std::int64_t num_entries() const {
    return static_cast<std::int64_t>(seq_len.size());
  }
  [[nodiscard]] std::int64_t num_destinations() const {
    return static_cast<std::int64_t>(dst_rank.size());
  }
  [[nodiscard]] std::int64_t destination_begin(std::int64_t entry) const {
    return copy_offsets.empty() ? entry : copy_offsets[entry];
  }
  [[nodiscard]] std::int64_t destination_end(std::int64_t entry) const {
    return destination_begin(entry + 1);
  }

  friend bool operator==(const SparseMetadata&, const SparseMetadata&) = default;
};

}  // namespace waybill
