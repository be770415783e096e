#pragma once

#include "moves.h"
#include "waybill/cost_model/predict_step.h"

namespace waybill {

struct StepPredictor::Memory {
  detail::TimedPlan timed;

  /// @param even as if every rank had the mean of the work
  [[nodiscard]] StepPrediction predict(const StepOptions& options, bool even) const;
};

}  // namespace waybill
