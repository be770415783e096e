#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

/// Bytes of one row (token) on the wire.
struct RowBytes {
  std::int64_t q = 0;
  std::int64_t kv = 0;  ///< K and V together

  friend bool operator==(const RowBytes&, const RowBytes&) = default;
};

/// Rows of one tensor at one rank, in the forward direction.
struct RankTraffic {
  std::int64_t rows_out = 0;    ///< leave for other ranks; each copy counts
  std::int64_t rows_in = 0;     ///< come from other ranks
  std::int64_t rows_local = 0;  ///< from the rank to itself; never on the wire
};

/// The part of one rank in a plan. `bytes` are wire bytes: local rows do not count.
struct RankFigures {
  std::int64_t home_tokens = 0;  ///< rows in the MLP layout
  std::int64_t home_shards = 0;
  std::int64_t attended_shards = 0;  ///< query shards that the rank attends to
  std::int64_t work = 0;             ///< their (query, key) pairs
  RankTraffic q;
  RankTraffic kv;
  std::int64_t bytes_out = 0;
  std::int64_t bytes_in = 0;
  std::int64_t buffer_bytes = 0;  ///< Q and KV of the attention layout, local rows included
};

/// The rows from one rank to another, forward.
struct TrafficPair {
  std::int32_t src_rank = 0;
  std::int32_t dst_rank = 0;  ///< src_rank: rows that stay; they have bytes 0
  std::int64_t q_rows = 0;
  std::int64_t kv_rows = 0;
  std::int64_t bytes = 0;  ///< on the wire
};

/// The largest and the mean of a figure over the ranks.
struct Spread {
  std::int64_t max = 0;
  double mean = 0;
  std::int32_t max_rank = 0;  ///< the first with the maximum

  /// max / mean; 1 where all is 0.
  [[nodiscard]] double imbalance() const { return mean > 0 ? static_cast<double>(max) / mean : 1; }
};

/// Which way rows move at a rank.
enum class Direction : std::uint8_t { in, out };

/// The rank that gets or sends the most bytes.
struct RankLimit {
  std::int64_t bytes = 0;
  std::int32_t rank = 0;
  Direction direction = Direction::in;

  friend bool operator==(const RankLimit&, const RankLimit&) = default;
};

/// The largest entry of bytes in and of bytes out, a number per rank each; of equals in, and the
/// first rank.
[[nodiscard]] RankLimit limit_of(std::span<const std::int64_t> bytes_in,
                                 std::span<const std::int64_t> bytes_out);

/// The figures of a plan, forward direction. Backward the same rows move the other way: in and out
/// change places, the limit stays.
struct PlanSummary {
  std::int32_t world_size = 0;
  KvLayout kv_layout = KvLayout::per_rank;
  RowBytes row_bytes;
  std::int64_t num_documents = 0;
  std::int64_t num_shards = 0;
  std::int64_t num_tokens = 0;
  std::int64_t longest_document = 0;  ///< tokens
  std::int64_t median_document = 0;   ///< tokens; the lower of two middle ones
  std::int64_t longest_shard = 0;     ///< tokens

  std::vector<RankFigures> ranks;   ///< [W]
  std::vector<TrafficPair> pairs;   ///< by dst_rank, then src_rank; only those with rows
  std::int64_t num_wire_pairs = 0;  ///< among W * (W - 1)

  RankTraffic q;  ///< sums over the ranks; rows_out equals rows_in
  RankTraffic kv;
  std::int64_t wire_bytes = 0;
  std::int64_t work = 0;
  double kv_copies = 0;  ///< KV rows stored in the attention layout over tokens

  Spread rank_work;
  Spread rank_bytes_in;
  Spread rank_bytes_out;

  /// The limit of the plan: max over ranks of max(bytes in, bytes out).
  std::int64_t limit_bytes = 0;
  std::int32_t limit_rank = 0;
  Direction limit_direction = Direction::in;
  /// The same where receivers forward K and V (relay), if they will: what reports speak of then.
  /// Set by callers that have a schedule; summarize knows none.
  std::optional<RankLimit> relay_limit;

  /// The limit of the way that is taken.
  [[nodiscard]] RankLimit taken_limit() const {
    return relay_limit ? *relay_limit : RankLimit{limit_bytes, limit_rank, limit_direction};
  }

  /// Seconds that the taken limit takes at `gb_per_s` (1e9 bytes per second each way, per rank).
  /// @throws InvalidArgument unless gb_per_s > 0.
  [[nodiscard]] double limit_seconds(double gb_per_s) const;
};

/// Counts what `routing`, computed from `plan`, moves. Linear in shards, copies and ranks.
/// @throws InvalidArgument when plan.check() does, for negative row sizes, for a routing of another
///   plan (world size, shards, lengths), and when bytes or work exceed 2^63 - 1.
[[nodiscard]] PlanSummary summarize(const QkvPlan& plan, const QkvRouting& routing,
                                    const RowBytes& row_bytes);

struct TextStyle {
  bool unicode = true;      ///< bars of block characters; else '#'
  bool colour = false;      ///< ANSI escape sequences
  int width = 80;           ///< columns of sentences
  int max_rank_lines = 16;  ///< larger worlds: the first, the last and the worst ranks
  double gb_per_s = 0;      ///< link speed for times, 1e9 bytes/s each way; 0: no times
};

/// The meaning of the figures, a sentence each: which rank is heaviest, which document causes its
/// bytes, how even work and bytes are, how often KV is stored. Plain text without line breaks.
/// `plan`, `routing` and `summary` belong together.
/// @throws InvalidArgument as summarize.
[[nodiscard]] std::vector<std::string> explain(const QkvPlan& plan, const QkvRouting& routing,
                                               const PlanSummary& summary, double gb_per_s = 0);

/// Figures, a line per rank with bars, and explain(), for a terminal. Tables take 80 columns.
/// @throws InvalidArgument as summarize.
[[nodiscard]] std::string text_summary(const QkvPlan& plan, const QkvRouting& routing,
                                       const PlanSummary& summary, const TextStyle& style = {});

}  // namespace waybill
