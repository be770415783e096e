#include "waybill/cost_model/expert_costs.h"

#include "check_number.h"
#include "waybill/core/error.h"

namespace waybill {

using detail::check_number;

std::string_view to_string(ExpertPath path) {
  return path == ExpertPath::waiting ? "waiting" : "pipelined";
}

void ExpertCosts::check(const char* who) const {
  require(num_sms >= 1, who, ": costs.num_sms = ", num_sms, ", expected >= 1");
  check_number(who, "costs.count_seconds", count_seconds, true);
  check_number(who, "costs.count_token_seconds", count_token_seconds, true);
  check_number(who, "costs.sum_bytes_per_second", sum_bytes_per_second, false);
  check_number(who, "costs.copy_bytes_per_second", copy_bytes_per_second, false);
  check_number(who, "costs.kernel_seconds", kernel_seconds, true);
  check_number(who, "costs.last_row_seconds", last_row_seconds, true);
  check_number(who, "costs.put_seconds", put_seconds, true);
  check_number(who, "costs.path_bytes_per_second", path_bytes_per_second, true);
}

void ExpertCostOptions::check(const char* who) const {
  links.check(who);
  HardwareFacts hardware;
  hardware.message_seconds = message_seconds;
  StepOptions{.hardware = hardware, .costs = step}.check(who);
  costs.check(who);
}

}  // namespace waybill
