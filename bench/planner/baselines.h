#pragma once

#include <cstdint>
#include <span>

#include "waybill/routing/qkv_plan.h"

namespace waybill::bench {

/// Documents packed in order into ranks of equal size; what other systems make of them, written
/// from their published descriptions. For comparison only.
struct BaselineOptions {
  std::int32_t world_size = 8;
  std::int64_t tokens_per_rank = 65536;
};

/// The greedy planner of DistCA. Ranks below the mean work, the neediest first, take items until
/// they are within `tolerance` of the mean; always the item with the fewest bytes for its work,
/// where a document's keys are counted whole. Of an item that is too large a head and a tail of
/// equal length go, so that each pair has the same work. A document that fits no rank lies as heads
/// and tails on several.
[[nodiscard]] QkvPlan greedy_plan(std::span<const std::int64_t> documents,
                                  const BaselineOptions& options, double tolerance = 0.1);

/// Whole documents, most work first, each to the rank with the least work so far (Graham).
[[nodiscard]] QkvPlan longest_first_plan(std::span<const std::int64_t> documents,
                                         const BaselineOptions& options);

}  // namespace waybill::bench
