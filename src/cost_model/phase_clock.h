#pragma once

#include <cstdint>
#include <vector>

#include "flows.h"
#include "waybill/cost_model/predict_step.h"

namespace waybill::detail {

/// Seconds of the four links of a rank, as if it were alone.
struct LinkSeconds {
  double nvlink_in = 0;
  double nvlink_out = 0;
  double network_in = 0;
  double network_out = 0;

  [[nodiscard]] double in() const { return nvlink_in > network_in ? nvlink_in : network_in; }
  [[nodiscard]] double out() const { return nvlink_out > network_out ? nvlink_out : network_out; }
  [[nodiscard]] double most() const { return in() > out() ? in() : out(); }
  /// The link that takes longest; nothing if none takes any time.
  [[nodiscard]] StepResource slowest() const;
};

/// Which way a set of flows crosses.
enum class FlowWay : std::uint8_t { forward, reverse };

/// Runs one phase in which rows move: fills `phase` (all but the document of `slowest`), whose
/// `begin` and `phase` are set.
/// @param nvlink_share speed over that of a push
void run_transfer(const FlowSet& set, FlowWay way, double nvlink_share, const Topology& nodes,
                  const StepOptions& options, PhasePrediction& phase);

/// Runs one kernel: `seconds` is set, too.
void run_kernel(PhasePrediction& phase);

}  // namespace waybill::detail
