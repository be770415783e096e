#pragma once

#include <cstdint>
#include <vector>

#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// Where everything must lie, derived from a plan alone, by other means than the routing code.
/// N = shards, W = ranks. Tokens.
struct ExpectedLayout {
  std::vector<std::int64_t> home_rows;  ///< [W]: rows in the MLP layout
  std::vector<std::int64_t>
      home_begin;  ///< [N]: row in the MLP layout of all ranks, one after another
  std::vector<std::int32_t> home_rank;     ///< [N]
  std::vector<std::int32_t> document;      ///< [N]
  std::vector<std::int32_t> position;      ///< [N]: in its document
  std::vector<std::int64_t> rank_offsets;  ///< [W + 1]: into received
  std::vector<std::int32_t> received;      ///< [N]: query shards by attention rank, global order
  std::vector<std::int64_t> q_begin;       ///< [N] by shard: row in its attention rank's Q buffer
  std::vector<std::int64_t> q_rows;        ///< [W]
  std::vector<std::int64_t> kv_begin;      ///< [N] by shard: its context in the KV buffer
  std::vector<std::int64_t> kv_len;        ///< [N] by shard
  std::vector<std::int64_t> kv_rows;       ///< [W]
  std::vector<std::int64_t> num_destinations;  ///< [N]: places to which the shard's KV goes
  std::vector<std::int64_t> num_planes;        ///< [W]: the most of them on a rank
};

/// @param plan one that passes QkvPlan::check
[[nodiscard]] ExpectedLayout expect_layout(const QkvPlan& plan);

/// First position in its document that the queries of `shard` need.
[[nodiscard]] inline std::int32_t first_needed(const QkvPlan& plan, std::int32_t shard) {
  return plan.kv_begin.empty() ? 0 : plan.kv_begin[static_cast<std::size_t>(shard)];
}

/// Last position in its document that they need.
[[nodiscard]] inline std::int32_t last_needed(const QkvPlan& plan, const ExpectedLayout& layout,
                                              std::int32_t shard) {
  const auto s = static_cast<std::size_t>(shard);
  if (plan.mask == MaskKind::causal) return layout.position[s];
  const auto d = static_cast<std::size_t>(layout.document[s]);
  return static_cast<std::int32_t>(plan.doc_shard_offsets[d + 1] - plan.doc_shard_offsets[d]) - 1;
}

}  // namespace waybill::detail
