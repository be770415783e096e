#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "waybill/report/plan_summary.h"
#include "waybill/report/step_report.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

enum class CheckState : std::uint8_t { passed, failed, not_run };

/// One line under "Checks".
struct ReportCheck {
  std::string name;
  CheckState state = CheckState::not_run;
  std::string detail;
};

/// One line under "Input".
struct ReportFact {
  std::string label;
  std::string value;
};

/// The texts of a report besides the figures. All are plain; the page escapes them.
struct ReportContext {
  std::string title = "Waybill report";
  std::string command;  ///< how to make the page again; may be empty
  std::vector<ReportFact> inputs;
  std::vector<ReportCheck> checks;
  double gb_per_s = 0;              ///< link speed for times, 1e9 bytes/s each way; 0: none
  std::vector<NamedStep> steps;     ///< predictions to be drawn as timelines
  std::int64_t max_documents = 40;  ///< documents drawn, longest first
};

/// A page that stands alone in one file: inline style and SVG, no script, nothing from a network;
/// light or dark as the reader's system asks. Worlds over 128 ranks are drawn in 128 blocks.
/// `plan`, `routing` and `summary` belong together.
/// @throws InvalidArgument as summarize.
[[nodiscard]] std::string html_report(const QkvPlan& plan, const QkvRouting& routing,
                                      const PlanSummary& summary, const ReportContext& context);

}  // namespace waybill
