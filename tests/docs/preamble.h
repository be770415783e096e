#pragma once

// What the examples of docs/ may use without saying so.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/hash.h"
#include "experts/expert_memory.h"
#include "runtime/fingerprint.h"
#include "schedule/sequence_plan.h"
#include "transport/transport.h"
#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/index_array.h"
#include "waybill/core/random.h"
#include "waybill/core/small_floats.h"
#include "waybill/core/topology.h"
#include "waybill/core/wait.h"
#include "waybill/cost_model/predict_experts.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/cost_model/predict_ulysses.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/json/file.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/json/plan_json.h"
#include "waybill/moe/expert_routing.h"
#include "waybill/moe/payload_format.h"
#include "waybill/moe/simulate.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/static_plans.h"
#include "waybill/planner/varlen_relay.h"
#include "waybill/report/expert_summary.h"
#include "waybill/report/html_report.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/index_ops.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"
#include "waybill/runtime/sequence_dispatcher.h"
#include "waybill/runtime/world.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/orchestrate.h"
#include "waybill/transport/bootstrap.h"

namespace {

using namespace waybill;  // NOLINT(google-build-using-namespace): examples read better

/// Fails the test, at the line of the page, unless `ok`. (clang 14 has no std::source_location.)
[[maybe_unused]] void expect(bool ok, const char* file = __builtin_FILE(),
                             int line = __builtin_LINE()) {
  if (!ok) ADD_FAILURE_AT(file, line) << "expect() got false";
}

/// Fails the test unless `call` throws an Error whose text contains `part`.
template <class Call>
void expect_error(Call&& call, std::string_view part, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  try {
    call();
  } catch (const Error& error) {
    if (std::string_view(error.what()).find(part) != std::string_view::npos) return;
    ADD_FAILURE_AT(file, line) << "the error says: " << error.what();
    return;
  }
  ADD_FAILURE_AT(file, line) << "no error";
}

}  // namespace
