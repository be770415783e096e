#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "command_line.h"
#include "waybill/planner/planner.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/validate.h"

namespace waybill::cli {

struct Program;

/// The options of all commands; each command adds those that it has.
struct Options {
  // Files.
  std::string input;
  std::string output;
  std::string trace;
  std::string html;
  bool no_html = false;
  bool compact = false;    ///< JSON without line breaks
  bool full = false;       ///< all figures of a plan
  bool normalize = false;  ///< dtypes of device tables
  std::string table;
  std::int32_t rank = -1;  ///< -1: all

  // Document lengths come from one of the first three.
  std::string distribution;  ///< a name; empty: the first
  std::string lengths_path;
  std::string corpus_path;
  std::uint64_t seed = 0;

  // How documents become a plan.
  std::int32_t world_size = 8;
  std::string world_sizes = "8";  ///< compare takes several, with commas between them
  std::string tokens_per_rank;    ///< a number, "auto", or empty: as many as fit the source
  bool cut = false;               ///< documents for which the ranks have no room are left out
  std::string kv_layout = "per_rank";
  std::string mask = "causal";
  std::int64_t window = 0;
  std::int64_t chunk = 0;
  std::int64_t prefix = 0;
  std::int64_t max_tokens = 0;
  double imbalance = 1.01;
  std::int32_t ranks_per_node = 8;

  // Sizes of the rows for which bytes are counted.
  std::int64_t q_hidden = 4096;
  std::int64_t kv_hidden = 1024;
  std::string dtype = "bfloat16";
  double gb_per_s = 0;

  // Validation.
  std::string reverse;  ///< file of reverse metadata
  ValidateOptions checks;

  // The byte-checked run, and the run on GPUs.
  bool no_simulate = false;
  std::string payload_bytes = "auto";
  int num_threads = 0;
  bool gpus = false;
  int num_sms = 16;

  // Speeds for predictions; empty: the default, or that of the file.
  std::string links;  ///< file of waybill calibrate
  std::string nvlink;
  std::string network;
  double pairs_per_second = 0;  ///< 0: from the default operations per second

  // The machine.
  bool json = false;
  bool measure = false;
  std::string python;  ///< its version; empty: the program was called without Python
  std::string torch;   ///< its version; empty: not installed

  // Predictions.
  std::string transfer = "auto";
  std::int32_t degree = 0;
  std::int64_t head_dim = 128;

  [[nodiscard]] bool is_drawn() const { return lengths_path.empty() && corpus_path.empty(); }
  [[nodiscard]] RowBytes row_bytes() const;
  /// All of a rank's links.
  [[nodiscard]] LinkSpeeds speeds() const;
  /// `defaults` with the speeds that were given.
  [[nodiscard]] HardwareFacts facts(HardwareFacts defaults) const;
};

// Headings of --help, of which a command can get all options again.
inline constexpr const char* documents_group = "Documents";
inline constexpr const char* plan_group = "Plan";
inline constexpr const char* rows_group = "Bytes that are counted";
inline constexpr const char* run_group = "Byte-checked run";
inline constexpr const char* hardware_group = "Hardware";
inline constexpr const char* output_group = "Output";

/// Adds a command with its own options; `work` is done if it is chosen, and returns the exit code.
[[nodiscard]] std::pair<Command, Options&> add_command(
    Command app, Program& program, const std::string& name, const std::string& text,
    int (*work)(const Options& options, Command command, Program& program));

/// A positional argument: a file to read.
Option add_input(Command command, Options& options, const std::string& name,
                 const std::string& text);
Option add_table_option(Command command, Options& options);
Option add_rank_option(Command command, Options& options, const std::string& text);
void add_compact_flag(Command command, Options& options);

void add_document_options(Command command, Options& options);
Option add_seed_option(Command command, Options& options, const std::string& text);
/// @param ranks_name the option for the number of ranks; empty: none
void add_plan_options(Command command, Options& options,
                      const std::string& ranks_name = "--world-size");
void add_ranks_per_node(Command command, Options& options);
void add_row_options(Command command, Options& options);
void add_run_options(Command command, Options& options);
/// RATE, which parse_rate reads.
void add_rate_option(Command command, const std::string& name, std::string& value,
                     const std::string& text);
void add_link_options(Command command, Options& options);
/// Links, and attention.
void add_hardware_options(Command command, Options& options);
void add_trace_option(Command command, Options& options);
/// The page and the trace.
void add_report_options(Command command, Options& options, const std::string& html_text);

/// Bytes per second from "50GB/s", "400Gbit/s", "400Gbps", "345" (GB/s); units B, kB, MB, GB, TB,
/// and bit or b in place of B; "ps" or "/s". None when it is something else, or a speed that makes
/// no sense.
[[nodiscard]] std::optional<double> parse_rate(const std::string& text);

/// "2,4,8": at least one number, each 1 to max_world_size; none for another text.
[[nodiscard]] std::optional<std::vector<std::int64_t>> parse_world_sizes(const std::string& text);

}  // namespace waybill::cli
