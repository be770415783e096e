#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "waybill/core/index_array.h"
#include "waybill/core/table_allocator.h"
#include "waybill/core/topology.h"

namespace waybill {

/// Which rows of one tensor go where, in one direction, for all ranks: the dense form, field by
/// field that of DistCA. W = world_size, S = most shards on a rank, C = most copies
/// of a shard. Every offset, length and count is in tokens (rows).
///
/// Rank w holds its shards back to back in index order, so shard j begins at row
/// seq_len[w][0] + ... + seq_len[w][j-1]. Padding: dst_rank -1, dst_offset 0, seq_len 0; it may
/// stand anywhere. The slice of one rank drops the first axis.
struct Metadata {
  IndexArray dst_rank;    ///< [W, S] or [W, S, C]: destination rank, -1 none
  IndexArray dst_offset;  ///< as dst_rank: first row in the destination's buffer
  IndexArray seq_len;     ///< [W, S]: rows of the shard
  /// [W, W + 1]: [r][i] rows that r gets from i; last column the sum. [W, 1] of sums alone, or [0],
  /// as it is at first: not known.
  IndexArray num_recv_tokens;
  std::optional<IndexArray> seq_recv_mask;  ///< [W, S, C] bool: which copies come back (reverse)
  std::optional<IndexArray> recv_seq_lens;  ///< [W, S]: lengths of the shards that come back
  std::optional<IndexArray> num_seqs;       ///< [W], or [W, 1]: shards with rows; none in a slice
  std::optional<std::int64_t> world_size;   ///< none in a slice
  bool normalized = false;                  ///< dtypes are those of the device form
  std::vector<std::int64_t> num_total_recv_tokens;  ///< [W]; one value in a slice; empty: unknown

  /// True for what get_slice returns.
  [[nodiscard]] bool is_slice() const { return seq_len.ndim() == 1; }

  /// True when a shard may have several destinations (dst_rank has a copy axis).
  [[nodiscard]] bool has_copies() const { return dst_rank.ndim() == seq_len.ndim() + 1; }

  /// True unless num_recv_tokens is [0].
  [[nodiscard]] bool has_counts() const { return num_recv_tokens.shape() != Shape{0}; }

  /// The entries of one rank. Entries that move nothing (no destination and no rows) are dropped
  /// wherever they stand, so interior padding and shards of length 0 lose nothing. seq_recv_mask
  /// and recv_seq_lens keep their padding, since they describe the receiving buffer.
  /// @throws InvalidArgument for a rank outside the world, or when *this is a slice.
  [[nodiscard]] Metadata get_slice(Rank rank) const;

  /// The dtypes of device tables: dst_rank, num_seqs int32; dst_offset, seq_len, seq_recv_mask,
  /// recv_seq_lens uint32; num_recv_tokens uint64. Works on slices too.
  /// @throws InvalidArgument naming field, position and value of what does not fit.
  [[nodiscard]] Metadata normalize_dtype() const;

  /// Throws unless the shapes agree with each other as stated above. Values are not looked at.
  /// @throws InvalidArgument naming the field, its shape and the expected one; `who` begins it.
  void check_shapes(const char* who) const;

  /// Throws unless num_recv_tokens has a count per pair of ranks, as JSON and sparse tables need.
  /// @throws InvalidArgument naming what is missing; `who` begins it.
  void check_counts(const char* who) const;

  friend bool operator==(const Metadata&, const Metadata&) = default;
};

/// Readable text: rank by rank, one entry per shard. Never throws for what the fields hold: arrays
/// that do not fit each other are shown as they are, and what is odd is named at the end.
[[nodiscard]] std::string to_string(const Metadata& metadata);
std::ostream& operator<<(std::ostream& out, const Metadata& metadata);

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
