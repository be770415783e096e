#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "waybill/planner/planner_options.h"
#include "waybill/planner/relay.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/validate.h"

namespace waybill {

/// A plan with its figures: which rank attends to which queries, and what that costs. Plain data.
/// W = ranks, N = shards. Bytes are wire bytes, forward: rows of Q that leave home, and rows of KV
/// that other ranks need, once per rank and document (per_query: once per query shard), as routing
/// moves them. Backward in and out change places.
struct AttentionPlan {
  PlannerOptions options;  ///< as planned; tokens_per_rank decided
  QkvPlan plan;

  /// [W] what is balanced: (query, key) pairs of the mask, exact, and the pairs that
  /// hardware.row_pairs and shard_pairs add for each row of queries and each shard; see kernel_work
  std::vector<std::int64_t> work;
  std::vector<std::int64_t> home_tokens;       ///< [W] rows in the MLP layout
  std::vector<std::int64_t> attention_tokens;  ///< [W] rows of Q in the attention layout
  std::vector<std::int64_t> kv_tokens;         ///< [W] rows of KV in the attention layout
  std::vector<LinkBytes> links;                ///< [W] direct
  RelaySchedule relay;                         ///< empty unless options.relay

  /// Work of the heaviest block of `options.block_tokens` queries in the plan: what balance by
  /// blocks cannot go below.
  std::int64_t block_work = 0;
  /// No plan whose largest work is as small has fewer bytes in at its worst rank: the end of a long
  /// document goes to ranks that are not its home, as its homes cannot do all of that work.
  std::int64_t least_bytes_in = 0;

  [[nodiscard]] std::vector<std::int64_t> bytes_in()
      const;  ///< [W] direct; relay does not change it
  [[nodiscard]] std::vector<std::int64_t> bytes_out() const;                       ///< [W] direct
  [[nodiscard]] std::vector<std::int64_t> bytes_out(TransferMode transfer) const;  ///< [W]
  /// Bytes per rank and link. once_per_node computes the routing anew; where ranks do not fill all
  /// nodes it equals direct. Without relay, relay equals direct. [W]
  [[nodiscard]] std::vector<LinkBytes> links_of(TransferMode transfer) const;

  /// Largest work over mean work; 1 where there is none.
  [[nodiscard]] double imbalance() const;
  /// True when the largest work is at most imbalance_target * mean, or within one block of the
  /// mean.
  [[nodiscard]] bool balanced() const;

  /// The least time that the links allow: over ranks, the largest of bytes in and bytes out of each
  /// kind of link over its speed, of links_of(transfer).
  [[nodiscard]] double limit_seconds(TransferMode transfer) const;
  /// With relay where there is one.
  [[nodiscard]] double limit_seconds() const {
    return limit_seconds(relay.empty() ? TransferMode::direct : TransferMode::relay);
  }

  friend bool operator==(const AttentionPlan&, const AttentionPlan&) = default;
};

/// A few lines: ranks, balance, bytes, limits.
[[nodiscard]] std::string to_string(const AttentionPlan& plan);
std::ostream& operator<<(std::ostream& out, const AttentionPlan& plan);

/// Checks a plan against itself: the QkvPlan and the routing computed from it (see validate), the
/// capacity, every figure counted anew from the routing and the mask, and the relay schedule
/// carried out hop by hop: every rank gets every KV row that it needs, once, from a rank that has
/// it. Never throws for what it finds. Empty: all is right.
[[nodiscard]] std::vector<Finding> validate(const AttentionPlan& plan,
                                            const ValidateOptions& options = {});

}  // namespace waybill
