#pragma once

#include <cstdint>
#include <utility>

#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// Builds a plan whose shards are appended in the global order.
class PlanBuilder {
 public:
  PlanBuilder(std::int64_t world_size, KvLayout kv_layout) {
    plan_.world_size = static_cast<std::int32_t>(world_size);
    plan_.kv_layout = kv_layout;
    plan_.rank_shard_offsets = {0};
    plan_.doc_shard_offsets = {0};
  }

  /// Appends a shard to the current rank and the current document.
  void add_shard(std::int64_t num_tokens, std::int64_t q_dst) {
    plan_.doc_shards.push_back(static_cast<std::int32_t>(plan_.shard_len.size()));
    plan_.shard_len.push_back(num_tokens);
    plan_.q_dst.push_back(static_cast<std::int32_t>(q_dst));
  }

  void end_document() { plan_.doc_shard_offsets.push_back(plan_.num_shards()); }
  void end_rank() { plan_.rank_shard_offsets.push_back(plan_.num_shards()); }

  /// Hands the plan over; the builder is empty afterwards.
  [[nodiscard]] QkvPlan take() { return std::move(plan_); }

 private:
  QkvPlan plan_;
};

}  // namespace waybill::detail
