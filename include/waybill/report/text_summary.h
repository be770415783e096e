#pragma once

#include <string>
#include <vector>

#include "waybill/report/plan_summary.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

struct TextStyle {
  bool unicode = true;      ///< bars of block characters; else '#'
  bool colour = false;      ///< ANSI escape sequences
  int width = 80;           ///< columns of sentences
  int max_rank_lines = 16;  ///< larger worlds: the first, the last and the worst ranks
  double gb_per_s = 0;      ///< link speed for times, 1e9 bytes/s each way; 0: no times
};

/// What the figures mean, a sentence each: which rank is heaviest, which document causes its bytes,
/// how even work and bytes are, how often KV is stored. Plain text without line breaks.
/// `plan`, `routing` and `summary` belong together.
/// @throws InvalidArgument as summarize.
[[nodiscard]] std::vector<std::string> explain(const QkvPlan& plan, const QkvRouting& routing,
                                               const PlanSummary& summary, double gb_per_s = 0);

/// Figures, a line per rank with bars, and explain(), for a terminal. Tables take 80 columns.
/// @throws InvalidArgument as summarize.
[[nodiscard]] std::string text_summary(const QkvPlan& plan, const QkvRouting& routing,
                                       const PlanSummary& summary, const TextStyle& style = {});

}  // namespace waybill
