#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "command_line.h"
#include "waybill/planner/planner_options.h"
#include "waybill/report/plan_summary.h"

namespace waybill::cli {

/// Where document lengths come from: one of the three.
struct SourceOptions {
  std::string distribution;  ///< a name; empty: the first
  std::string lengths_path;
  std::string corpus_path;
  std::uint64_t seed = 0;

  [[nodiscard]] bool is_drawn() const { return lengths_path.empty() && corpus_path.empty(); }
};

/// How documents become a plan, before `auto` is resolved.
struct PlanningOptions {
  std::int32_t world_size = 8;
  std::string tokens_per_rank;  ///< a number, "auto", or empty: what fits the source
  bool cut = false;             ///< documents for which the ranks have no room are left out
  std::string kv_layout = "per_rank";
  std::string mask = "causal";
  std::int64_t window = 0;
  std::int64_t max_tokens = 0;
  double imbalance = 1.01;
  std::int32_t ranks_per_node = 8;
};

/// Sizes of the rows for which bytes are counted.
struct RowOptions {
  std::int64_t q_hidden = 4096;
  std::int64_t kv_hidden = 1024;
  std::string dtype = "bfloat16";
  double gb_per_s = 0;

  [[nodiscard]] RowBytes row_bytes() const;
};

/// What the byte-checked run moves.
struct SimulationOptions {
  std::string payload_bytes = "auto";
  int num_threads = 0;
};

/// Speeds for predictions; empty: the default, or what the file says.
struct HardwareOptions {
  std::string links;  ///< file of waybill calibrate
  std::string nvlink;
  std::string network;
  double pairs_per_second = 0;  ///< 0: from the default operations a second

  [[nodiscard]] HardwareFacts facts(HardwareFacts defaults) const;
  /// All of a rank's links.
  [[nodiscard]] LinkSpeeds speeds() const;
};

/// Where predictions go beside the terminal.
struct StepOutputOptions {
  std::string trace;
  std::string html;
};

void add_source_options(Command command, SourceOptions& options);
/// @param ranks_name how the number of ranks is called
void add_planning_options(Command command, PlanningOptions& options,
                          const std::string& ranks_name = "--world-size");
void add_link_options(Command command, HardwareOptions& options);
/// Links, and attention.
void add_hardware_options(Command command, HardwareOptions& options);
void add_trace_option(Command command, StepOutputOptions& options);
void add_row_options(Command command, RowOptions& options);
void add_simulation_options(Command command, SimulationOptions& options);

/// Document lengths that fit a plan, and how they came about.
struct Documents {
  std::vector<std::int64_t> lengths;
  std::string origin;                ///< one line
  std::vector<std::string> remarks;  ///< what was skipped, cut, left out or left empty
  PlannerOptions plan;               ///< with tokens_per_rank decided
};

/// Reads or draws the documents and fits them into the ranks.
/// @throws UsageError for options that do not go together, and where the ranks have no room for all
/// tokens unless planning.cut; IoError for what cannot be read.
[[nodiscard]] Documents load_documents(const SourceOptions& source, const PlanningOptions& planning,
                                       const RowOptions& rows);

/// The rule by which --corpus counts tokens, for --help and reports.
[[nodiscard]] std::string corpus_rule();

}  // namespace waybill::cli
