#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "waybill/core/random.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::test {

struct DrawnPlanOptions {
  std::int32_t max_world_size = 64;
  std::int64_t max_shards = 60;
  bool empty_shards = true;  ///< some shards have no rows
};

/// Homes by rank; some ranks hold nothing. Lengths are 0 or 2..20.
inline void draw_shards(QkvPlan& plan, const DrawnPlanOptions& options, Random& random) {
  const std::int64_t num_shards = random.below(options.max_shards + 1);
  std::vector<std::int64_t> counts(plan.world_size);
  const std::int64_t homes = 1 + random.below(plan.world_size);
  for (std::int64_t s = 0; s < num_shards; ++s) ++counts[random.below(homes)];
  plan.rank_shard_offsets.assign(1, 0);
  for (const std::int64_t count : counts) {
    plan.rank_shard_offsets.push_back(plan.rank_shard_offsets.back() + count);
  }
  const std::int64_t few_ranks = 1 + random.below(std::min(plan.world_size, 6));
  const bool few = random.below(2) == 0;
  for (std::int64_t s = 0; s < num_shards; ++s) {
    const bool empty = options.empty_shards && random.below(7) == 0;
    plan.shard_len.push_back(empty ? 0 : 2 + random.below(19));
    plan.q_dst.push_back(static_cast<std::int32_t>(
        few ? plan.world_size - 1 - random.below(few_ranks) : random.below(plan.world_size)));
  }
}

/// Documents of 1..12 shards, of neighbours or of any shards; also a document without shards.
inline void draw_documents(QkvPlan& plan, Random& random) {
  const auto num_shards = static_cast<std::int32_t>(plan.num_shards());
  plan.doc_shards.resize(num_shards);
  for (std::int32_t s = 0; s < num_shards; ++s) plan.doc_shards[s] = s;
  if (random.below(2) == 0) plan.doc_shards = random.permutation(num_shards, num_shards);
  plan.doc_shard_offsets.assign(1, 0);
  while (plan.doc_shard_offsets.back() < num_shards) {
    const std::int64_t size = random.below(9) == 0 ? 0 : 1 + random.below(12);
    plan.doc_shard_offsets.push_back(
        std::min<std::int64_t>(num_shards, plan.doc_shard_offsets.back() + size));
  }
}

inline void draw_windows(QkvPlan& plan, Random& random) {
  plan.kv_begin.assign(plan.num_shards(), 0);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::int64_t begin = 0;
    const std::int64_t first = plan.doc_shard_offsets[d];
    for (std::int64_t p = 0; p < plan.doc_shard_offsets[d + 1] - first; ++p) {
      begin += random.below(p - begin + 1) * random.below(2);
      plan.kv_begin[plan.doc_shards[first + p]] = static_cast<std::int32_t>(begin);
    }
  }
}

inline void draw_ends(QkvPlan& plan, Random& random) {
  plan.kv_end.assign(plan.num_shards(), 0);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = plan.doc_shard_offsets[d];
    const std::int64_t num = plan.doc_shard_offsets[d + 1] - first;
    std::int64_t end = 0;
    for (std::int64_t p = 0; p < num; ++p) {
      end = std::max(end, p + 1);
      end += random.below(num - end + 1) * random.below(2);
      plan.kv_end[plan.doc_shards[first + p]] = static_cast<std::int32_t>(end);
    }
  }
}

/// Documents across ranks, empty ranks and shards, ranges of any kind or none, both layouts.
[[nodiscard]] inline QkvPlan draw_plan(Random& random, const DrawnPlanOptions& options = {}) {
  QkvPlan plan;
  plan.world_size = static_cast<std::int32_t>(
      1 + random.below(random.below(3) == 0 ? options.max_world_size
                                            : std::min(options.max_world_size, 6)));
  plan.kv_layout = random.below(2) == 0 ? KvLayout::per_query : KvLayout::per_rank;
  draw_shards(plan, options, random);
  draw_documents(plan, random);
  if (random.below(2) == 0) draw_windows(plan, random);
  const std::int64_t ends = random.below(4);
  if (ends == 0) draw_ends(plan, random);
  if (ends == 1 && plan.kv_begin.empty()) plan.need_whole_documents();
  return plan;
}

}  // namespace waybill::test
