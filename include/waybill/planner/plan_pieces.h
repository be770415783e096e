#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/planner/planner_options.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// Tokens [offset, offset + length) of a document, as a rank holds them.
struct DocumentRange {
  std::int64_t document = 0;  ///< any number; the same on all ranks
  std::int64_t offset = 0;
  std::int64_t length = 0;
};

/// plan_attention for documents whose tokens lie anywhere: each rank holds pieces, back to back in
/// its rows. The plan alone, without figures and without a relay.
///
/// @param rank_pieces [W][pieces]: every token of a document in one of them
/// @throws InvalidArgument naming rank and piece, or the document whose pieces do not add up; for
///   options as plan_attention, and for max_tokens_per_rank and byte_weight, which need figures.
[[nodiscard]] QkvPlan plan_pieces(std::span<const std::vector<DocumentRange>> rank_pieces,
                                  const PlannerOptions& options);

}  // namespace waybill
