#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "waybill/cost_model/predict_step.h"

namespace waybill {

/// What could be changed about a step.
enum class RemedyKind : std::uint8_t {
  relay,          ///< forward KV as the planner's schedule says
  once_per_node,  ///< send KV over the network once per node
  even_work,      ///< the same total work on each rank
  double_nvlink,
  double_network,
  double_compute,
};

[[nodiscard]] std::string_view to_string(RemedyKind kind);

struct Remedy {
  RemedyKind kind = RemedyKind::relay;
  double seconds = 0;  ///< of the step with it

  friend bool operator==(const Remedy&, const Remedy&) = default;
};

/// The step with each change that applies, one at a time, shortest first: relay and once_per_node
/// where they are not used and possible, the network where there are several nodes.
[[nodiscard]] std::vector<Remedy> step_remedies(const StepPredictor& predictor,
                                                const StepPrediction& step);

}  // namespace waybill
