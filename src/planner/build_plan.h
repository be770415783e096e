#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "balance.h"
#include "home_layout.h"
#include "waybill/planner/planner_options.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// Turns moves, ordered by piece and position, into shards. Neighbours with the same destination
/// are one shard. With a window, keys are cut where the queries that travel begin to need them.
class PlanWriter {
 public:
  void write(const HomeLayout& home, std::span<const Move> moves, const PlannerOptions& options,
             QkvPlan& plan);

 private:
  struct Cut {
    std::int64_t position = 0;
    std::int32_t doc = 0;
  };

  void find_cuts(const HomeLayout& home, std::span<const Move> moves,
                 const PlannerOptions& options);
  void write_kv_begin(const AttentionMask& mask, QkvPlan& plan);
  void number_by_rank(const HomeLayout& home, QkvPlan& plan);

  std::vector<Cut> cuts_;  // by document and position
  std::vector<std::int64_t> ends_;
  std::vector<std::int64_t> piece_shards_;  // [pieces + 1]: shards by piece, in its order
};

}  // namespace waybill::detail
