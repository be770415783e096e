#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "options.h"
#include "program.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/json/file.h"
#include "waybill/planner/planner.h"
#include "waybill/report/html_report.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"
#include "waybill/simulate/check.h"

namespace waybill::cli {

/// Document lengths that fit a plan, and how they came about.
struct Documents {
  std::vector<std::int64_t> lengths;
  std::string origin;                ///< one line
  std::vector<std::string> remarks;  ///< which were skipped, cut, left out; which rows stay empty
  PlannerOptions plan;               ///< with tokens_per_rank decided
};

/// Reads or draws the documents and fits them into the ranks.
/// @throws UsageError for options that do not go together, and where the ranks have no room for all
/// tokens unless options.cut; IoError for a file that cannot be read.
[[nodiscard]] Documents load_documents(const Options& options);

/// The rule by which --corpus counts tokens, for --help and reports.
[[nodiscard]] std::string corpus_rule();

/// A JSON file of ours: a plan; a plan with its metadata; or one metadata.
struct DispatchFile {
  std::string name;  ///< for messages
  std::optional<QkvPlan> plan;
  std::optional<AttentionPlan> attention;  ///< the same plan with its figures, of `plan --full`
  std::optional<E2eMetadata> bundle;       ///< only with a plan
  std::optional<Metadata> metadata;        ///< alone

  /// The bundle, computed from the plan if the file has none. @throws Unsupported for its size
  E2eMetadata& dense();
};

/// @throws IoError for a file that cannot be read or holds something else.
[[nodiscard]] DispatchFile read_dispatch_file(const std::string& path, ReadCheck check);

/// The same, with all checks; throws for a file without a plan.
[[nodiscard]] DispatchFile read_plan_file(const std::string& path);

/// "12 shards on 4 ranks"
[[nodiscard]] std::string shards_text(const QkvPlan& plan);

/// One of the four metadata by its name, which is right.
[[nodiscard]] Metadata& table_of(E2eMetadata& metadata, std::string_view name);

/// Throws unless the routing of the plan, in the sparse form, fits a machine's memory: a KV shard
/// has up to as many copies as its document has shards. @throws Unsupported
void check_routing_size(const QkvPlan& plan);

/// A plan whose step is to be predicted, and on which hardware.
struct StepJob {
  std::string origin;  ///< one line
  std::vector<std::string> remarks;
  QkvPlan plan;
  RelaySchedule relay;  ///< empty: none
  StepOptions options;  ///< with relay where there is a schedule

  [[nodiscard]] StepPredictor predictor() const { return StepPredictor(plan, &relay); }
};

/// With the options of the plan; `origin` is one line.
[[nodiscard]] StepJob step_job_of(AttentionPlan plan, std::string origin);

/// Plans documents. @throws as load_documents and plan_attention.
[[nodiscard]] StepJob step_job_of_documents(const Options& options);

/// A file of format waybill.attention_plan, waybill.plan or waybill.dispatch. Nodes, window, rows
/// and speeds are those of the options; of a waybill.attention_plan its own, but for options that
/// `is_given` says were typed.
[[nodiscard]] StepJob step_job_of_file(const Options& options,
                                       const std::function<bool(const std::string&)>& is_given);

/// "345 GB/s NVLink, 50.0 GB/s network, 8 ranks per node": the assumptions.
[[nodiscard]] std::string hardware_text(const StepOptions& options);

/// Writes the trace where one is asked for, and says so.
void write_trace(const Options& options, const std::vector<NamedStep>& steps, Console& console);

/// Writes the page that is asked for, and says so.
void write_html(const Options& options, const std::string& page, Console& console);

/// Writes the report of a plan with its timelines, and the trace, where they are asked for.
void write_step_reports(const Options& options, const StepJob& job,
                        const std::vector<NamedStep>& steps, Program& program);

/// The byte-checked run, with progress. Sets `payload_bytes` to the number that "auto" came to.
/// @throws Unsupported when it would not fit the memory of this machine.
[[nodiscard]] DispatchCheck run_checked(const QkvPlan& plan, const QkvRouting& routing,
                                        const Options& options, const Console& console,
                                        std::int64_t& payload_bytes);

/// "12,345 rows (1.2 GiB) compared byte by byte; ...": the extent of a check.
[[nodiscard]] std::string check_text(const DispatchCheck& check);

/// Findings a line each, at most `max_lines`, with a line for the others.
[[nodiscard]] std::string findings_text(const std::vector<Finding>& findings,
                                        std::int64_t max_lines);

}  // namespace waybill::cli
