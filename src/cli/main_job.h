#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "options.h"
#include "program.h"
#include "waybill/planner/attention_plan.h"
#include "waybill/report/html_report.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"
#include "waybill/simulate/check.h"

namespace waybill::cli {

/// What the main job is asked for.
struct MainJobOptions {
  SourceOptions source;
  PlanningOptions planning;
  RowOptions rows;
  SimulationOptions simulation;
  bool simulate = true;
};

/// What the main job made and found, step by step.
struct MainJob {
  Documents documents;
  AttentionPlan attention;
  QkvPlan plan;  ///< that of `attention`
  QkvRouting routing;
  std::vector<Finding> findings;       ///< of validate
  std::int64_t payload_bytes = 0;      ///< of a simulated row
  std::optional<DispatchCheck> check;  ///< none: not simulated
  PlanSummary summary;

  [[nodiscard]] bool passed() const { return findings.empty() && (!check || check->passed()); }
};

/// Document lengths -> plan -> metadata -> validation -> byte-checked dispatch -> figures; a line a
/// step on standard output as it goes.
[[nodiscard]] MainJob run_main_job(const MainJobOptions& options, Console& console);

/// The byte-checked run alone, with progress. Sets `payload_bytes` to what "auto" came to.
/// @throws Unsupported when it would not fit the memory of this machine.
[[nodiscard]] DispatchCheck run_checked(const QkvPlan& plan, const QkvRouting& routing,
                                        const SimulationOptions& options, const Console& console,
                                        std::int64_t& payload_bytes);

/// "12,345 rows (1.2 GiB) compared byte by byte; ...": what a check did.
[[nodiscard]] std::string check_text(const DispatchCheck& check);

/// Findings a line each, at most `most`, with a line for what is left.
[[nodiscard]] std::string findings_text(const std::vector<Finding>& findings, std::size_t most);

/// What forwarding K and V changes: the largest bytes out and the limit.
[[nodiscard]] std::string relay_text(const AttentionPlan& plan);

/// What the report says beside the figures.
[[nodiscard]] ReportContext report_context(const MainJob& job, const MainJobOptions& options,
                                           const std::string& command);

}  // namespace waybill::cli
