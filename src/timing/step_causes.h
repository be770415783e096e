#pragma once

#include <vector>

#include "moves.h"
#include "waybill/timing/predict_step.h"

namespace waybill::detail {

/// Fills amount, document and document_amount of causes whose phase, rank and resource are set.
/// One walk over all rows that move, whatever their number.
/// @param work [N] pairs of each shard
void find_documents(const TimedPlan& timed, const NodeMap& nodes, const StepOptions& options,
                    const std::vector<std::int64_t>& work, std::vector<StepCause*> causes);

}  // namespace waybill::detail
