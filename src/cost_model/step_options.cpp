#include "waybill/cost_model/step_options.h"

#include "check_number.h"
#include "waybill/core/error.h"

namespace waybill {

using detail::check_number;

StepOptions StepOptions::of(const AttentionPlan& plan) {
  StepOptions options;
  options.model = plan.options.model;
  options.mask = plan.options.mask;
  options.hardware = plan.options.hardware;
  options.transfer = plan.relay.empty() ? TransferMode::direct : TransferMode::relay;
  return options;
}

void StepOptions::check(const char* who) const {
  PlannerOptions options;
  options.model = model;
  options.mask = mask;
  options.hardware = hardware;
  options.check(who);
  check_number(who, "costs.phase_seconds", costs.phase_seconds, true);
  check_number(who, "costs.pull_share", costs.pull_share, false);
  check_number(who, "costs.forward_share", costs.forward_share, false);
  check_number(who, "costs.network_message_seconds", costs.network_message_seconds, true);
  check_number(who, "costs.network_post_seconds", costs.network_post_seconds, true);
  require(costs.forward_chunk_bytes >= 0, who,
          ": costs.forward_chunk_bytes = ", costs.forward_chunk_bytes, ", expected >= 0");
  check_number(who, "costs.forward_flops_per_second", costs.forward_flops_per_second, false);
  check_number(who, "costs.backward_flops_per_second", costs.backward_flops_per_second, false);
}

}  // namespace waybill
