#pragma once

#include <vector>

#include "moves.h"
#include "waybill/cost_model/predict_step.h"

namespace waybill::detail {

/// Fills amount, document and document_amount of causes whose phase, rank and resource are set.
/// A walk over all rows that move, for all causes at once.
/// @param work [N] pairs of each shard
void find_documents(const TimedPlan& timed, const Topology& nodes, const StepPrediction& step,
                    const std::vector<std::int64_t>& work, const std::vector<StepCause*>& causes);

}  // namespace waybill::detail
