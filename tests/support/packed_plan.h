#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include "waybill/routing/qkv_plan.h"

namespace waybill::test {

struct PackedPlanOptions {
  std::int32_t world_size = 8;
  std::int64_t tokens_per_rank = 65536;
  std::int64_t shard_tokens = 4096;  ///< longest query shard
  KvLayout kv_layout = KvLayout::per_rank;
};

/// Gives the shards to ranks, most work first: a shard stays at home if home stays within the mean
/// work of a rank, and goes to the rank with the least work so far otherwise.
inline void balance_shards(QkvPlan& plan) {
  const std::vector<std::int64_t> work = shard_work(plan);
  std::vector<std::int32_t> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](std::int32_t s) { return work[s]; });
  const double mean = std::accumulate(work.begin(), work.end(), 0.0) / plan.world_size;
  using Load = std::pair<std::int64_t, std::int32_t>;  // work, rank; ties go to the lowest rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> lightest;
  std::vector<std::int64_t> load(plan.world_size);
  for (std::int32_t r = 0; r < plan.world_size; ++r) lightest.emplace(0, r);
  for (const std::int32_t shard : order) {
    std::int32_t& rank = plan.q_dst[shard];
    if (static_cast<double>(load[rank] + work[shard]) > mean) {
      while (lightest.top().first != load[lightest.top().second]) lightest.pop();  // outdated
      if (lightest.top().first < load[rank]) rank = lightest.top().second;
    }
    load[rank] += work[shard];
    lightest.emplace(load[rank], rank);
  }
}

/// A plain plan: documents packed in order into the ranks, cut into shards of equal length, at most
/// `shard_tokens`, and balanced by work alone. The lengths must fit.
inline QkvPlan packed_plan(std::span<const std::int64_t> doc_lengths,
                           const PackedPlanOptions& options) {
  QkvPlan plan;
  plan.world_size = options.world_size;
  plan.kv_layout = options.kv_layout;
  plan.rank_shard_offsets = {0};
  plan.doc_shard_offsets = {0};
  std::int64_t room = options.tokens_per_rank;
  for (const std::int64_t length : doc_lengths) {
    for (std::int64_t left = length; left > 0;) {
      if (room == 0) {
        plan.rank_shard_offsets.push_back(plan.num_shards());
        room = options.tokens_per_rank;
      }
      const std::int64_t piece = std::min(left, room);
      const std::int64_t num_shards = 1 + (piece - 1) / options.shard_tokens;
      for (std::int64_t s = 0; s < num_shards; ++s) {
        plan.shard_len.push_back(piece / num_shards + (s < piece % num_shards ? 1 : 0));
        plan.q_dst.push_back(static_cast<std::int32_t>(plan.rank_shard_offsets.size()) - 1);
      }
      left -= piece;
      room -= piece;
    }
    plan.doc_shard_offsets.push_back(plan.num_shards());
  }
  plan.rank_shard_offsets.resize(options.world_size + 1, plan.num_shards());
  plan.doc_shards.resize(plan.shard_len.size());
  std::iota(plan.doc_shards.begin(), plan.doc_shards.end(), 0);
  balance_shards(plan);
  return plan;
}

}  // namespace waybill::test
