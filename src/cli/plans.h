#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "options.h"
#include "program.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/report/html_report.h"
#include "waybill/report/step_report.h"

namespace waybill::cli {

/// A plan whose step is to be predicted, and on what.
struct StepJob {
  std::string origin;  ///< one line
  std::vector<std::string> remarks;
  QkvPlan plan;
  RelaySchedule relay;  ///< empty: none
  StepOptions options;  ///< with relay where there is a schedule

  [[nodiscard]] StepPredictor predictor() const { return StepPredictor(plan, &relay); }
};

/// Plans documents. @throws as load_documents and plan_attention.
[[nodiscard]] StepJob step_job_of_documents(const SourceOptions& source,
                                            const PlanningOptions& planning, const RowOptions& rows,
                                            const HardwareOptions& hardware);

/// A file of format waybill.attention_plan, waybill.plan or waybill.dispatch. Nodes, window, rows
/// and speeds are those of the options; of a waybill.attention_plan its own, but for options that
/// `is_given` says were typed.
[[nodiscard]] StepJob step_job_of_file(const std::string& path, const PlanningOptions& planning,
                                       const RowOptions& rows, const HardwareOptions& hardware,
                                       const std::function<bool(const std::string&)>& is_given);

/// "345 GB/s NVLink, 50.0 GB/s network, 8 ranks per node": what was assumed.
[[nodiscard]] std::string hardware_text(const StepOptions& options);

/// Sentences as an indented list, wrapped at 80 columns.
[[nodiscard]] std::string sentence_list(const std::vector<std::string>& sentences);

/// Before work whose results go to these files. @throws IoError
void check_outputs(const StepOutputOptions& output);

/// Writes the trace where one is asked for, and says so.
void write_trace(const StepOutputOptions& output, const std::vector<NamedStep>& steps,
                 Console& console);

/// Writes the report of a plan with its timelines where one is asked for, and says so.
void write_step_html(const StepOutputOptions& output, const StepJob& job,
                     const std::vector<NamedStep>& steps, const std::string& command,
                     Console& console);

}  // namespace waybill::cli
