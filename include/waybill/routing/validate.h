#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

/// The kind of what is wrong.
enum class FindingKind : std::uint8_t {
  shape,          ///< an array's shape or the length of a table
  padding,        ///< an unused entry that is not -1 / 0 / 0
  rank_range,     ///< a rank outside the world
  negative,       ///< a negative length, offset or count
  bounds,         ///< rows past the end of a buffer
  capacity,       ///< a buffer larger than the given capacity
  overlap,        ///< two copies write the same row
  coverage,       ///< a row of a buffer that nobody writes
  undispatched,   ///< rows without destination
  order,          ///< rows not in the global order
  count,          ///< num_recv_tokens, num_seqs or totals disagree with the entries
  transpose,      ///< forward and reverse are not each other's transposed
  identity,       ///< Q does not come back to the row it left
  plan,           ///< a table that does not follow the plan: another length or destination
  document,       ///< the plan's documents do not hold each shard exactly once
  causality,      ///< a query misses KV rows that it needs, or sees others
  attention,      ///< cu_seqlens, maxima or counts of the attention layout
  mask,           ///< seq_recv_mask or recv_seq_lens
  normalization,  ///< dtypes do not agree with the `normalized` flag
};

[[nodiscard]] std::string_view to_string(FindingKind kind);

/// One thing that is wrong. Fields that do not apply are -1.
struct Finding {
  FindingKind kind{};
  std::string table;        ///< "plan", "fwd_q", "rev_q", "fwd_kv", "rev_kv", "attention"; of a
                            ///< pair by itself "fwd", "rev"
  std::string field;        ///< "dst_offset", ...
  std::int64_t rank = -1;   ///< sending rank, or the rank whose buffer or row it is
  std::int64_t shard = -1;  ///< place among the entries of that rank; of a plan: the shard's number
  std::int64_t copy = -1;   ///< copy of a forward table
  std::string got;
  std::string expected;
};

/// "fwd_q.dst_offset: rank 3, shard 7, copy 0: got 120, expected 128 (overlap)"
[[nodiscard]] std::string to_string(const Finding& finding);
std::ostream& operator<<(std::ostream& out, const Finding& finding);

struct ValidateOptions {
  std::int64_t q_capacity =
      -1;  ///< rows of the Q buffer of a rank in the attention layout; -1: any
  std::int64_t kv_capacity = -1;    ///< the same for KV
  std::int64_t max_findings = 100;  ///< stop after this many; below 1 counts as 1
};

/// Checks a plan by itself: that it keeps its own rules, and that no rank needs more rows than the
/// capacities. Time is linear in shards, copies and ranks, here and below. Never throws for what
/// it finds. Empty: all is right.
[[nodiscard]] std::vector<Finding> validate(const QkvPlan& plan,
                                            const ValidateOptions& options = {});

/// Checks one metadata by itself: shapes, padding, ranks, bounds, overlap, coverage, counts,
/// dtypes. With a seq_recv_mask it is the reverse of a table with copies: what arrives must be
/// exactly the copies that the mask names. The table's name in findings is "metadata".
[[nodiscard]] std::vector<Finding> validate(const Metadata& metadata,
                                            const ValidateOptions& options = {});

/// Checks one pair of metadata by itself: shapes, padding, ranks, bounds, overlap, coverage,
/// counts, masks, dtypes, and that reverse takes every row back to where forward took it from.
/// A forward table without a copy axis is checked against q_capacity, one with it against
/// kv_capacity. The reverse table defines the order of rows in a buffer; without a plan any order
/// is right.
[[nodiscard]] std::vector<Finding> validate(const Metadata& fwd, const Metadata& rev,
                                            const ValidateOptions& options = {});
[[nodiscard]] std::vector<Finding> validate(const SparseMetadata& fwd, const SparseMetadata& rev,
                                            const ValidateOptions& options = {});

/// Checks everything that was computed from a plan, against the plan: in addition that every query
/// meets exactly the KV rows that its mask asks for, and the attention layout.
[[nodiscard]] std::vector<Finding> validate(const QkvPlan& plan, const QkvRouting& routing,
                                            const ValidateOptions& options = {});
[[nodiscard]] std::vector<Finding> validate(const QkvPlan& plan, const E2eMetadata& metadata,
                                            const ValidateOptions& options = {});

}  // namespace waybill
