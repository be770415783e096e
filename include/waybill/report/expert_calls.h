#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/cost_model/predict_experts.h"
#include "waybill/report/text_summary.h"

namespace waybill {

/// The calls of a layer as predicted, a line each, and what the figures rest on; low latency where
/// `max_tokens` is small enough. 80 columns. @throws as predict_experts
[[nodiscard]] std::string expert_calls_text(const EPConfig& config,
                                            const EPDispatchOptions& dispatch,
                                            std::span<const std::vector<std::int32_t>> ids,
                                            const ExpertCostOptions& options = {},
                                            const TextStyle& style = {});

}  // namespace waybill
