#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/cost_model/predict_step.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

/// Predictions side by side, a column each: largest over mean work, bytes in and out, what the
/// step's path spends in each phase, forward, and the step. 80 columns wide for four predictions.
[[nodiscard]] std::string step_table(std::span<const NamedStep> steps);

/// A sentence that explains the name of a prediction of compare_plans or compare_transfers; "" for
/// another name.
[[nodiscard]] std::string_view meaning_of_step(std::string_view name);

/// The path of one prediction, a line for each phase: time, the rank that the others waited for,
/// its busy link or kernel with the amount, and the document that causes most of that. The times
/// add up to the step, which is the last line. For a terminal 80 columns wide.
[[nodiscard]] std::string phase_table(const StepPrediction& step);

/// The phases of one rank: begin, end, its own time, and for whom it waits.
/// @throws InvalidArgument for a rank outside the world.
[[nodiscard]] std::string rank_table(const StepPrediction& step, std::int32_t rank);

/// Which rank, which document and which link make the step slow, how even the work is, and what
/// would help, a sentence each, with numbers. Plain text without line breaks.
[[nodiscard]] std::vector<std::string> explain_step(const StepPrediction& step,
                                                    std::span<const Remedy> remedies = {});

/// Timelines for Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev): JSON in the trace-event
/// format. A process stands for a node of a prediction, a thread for a rank, an event for a phase;
/// its arguments hold the rank's bytes, its own time, and for whom it waited. Microseconds.
[[nodiscard]] std::string chrome_trace(std::span<const NamedStep> steps);

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
