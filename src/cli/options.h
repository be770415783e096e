#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "command_line.h"
#include "waybill/planner/planner.h"
#include "waybill/report/plan_summary.h"

namespace waybill::cli {

/// The options that several commands share; each command adds those that it has.
struct Options {
  // Files.
  std::string input;
  std::string output;
  std::string trace;
  std::string html;
  bool compact = false;  ///< JSON without line breaks
  std::string table;
  std::int32_t rank = -1;  ///< -1: all

  // Document lengths come from one of the first three.
  std::string distribution;  ///< a name; empty: the first
  std::string lengths_path;
  std::string corpus_path;
  std::uint64_t seed = 0;

  // How documents become a plan.
  std::int32_t world_size = 8;
  std::string tokens_per_rank;  ///< a number, "auto", or empty: as many as fit the source
  bool cut = false;             ///< documents for which the ranks have no room are left out
  std::string kv_layout = "per_rank";
  std::string mask = "causal";
  std::int64_t window = 0;
  std::int64_t max_tokens = 0;
  double imbalance = 1.01;
  std::int32_t ranks_per_node = 8;

  // Sizes of the rows for which bytes are counted.
  std::int64_t q_hidden = 4096;
  std::int64_t kv_hidden = 1024;
  std::string dtype = "bfloat16";
  double gb_per_s = 0;

  // The byte-checked run.
  std::string payload_bytes = "auto";
  int num_threads = 0;

  // Speeds for predictions; empty: the default, or that of the file.
  std::string links;  ///< file of waybill calibrate
  std::string nvlink;
  std::string network;
  double pairs_per_second = 0;  ///< 0: from the default operations per second

  // Predictions.
  std::string transfer = "auto";
  std::int32_t degree = 0;

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

/// A positional argument: a file to read.
Option add_input(Command command, Options& options, const std::string& name,
                 const std::string& text);
Option add_table_option(Command command, Options& options);
Option add_rank_option(Command command, Options& options, const std::string& text);
void add_compact_flag(Command command, Options& options);

void add_document_options(Command command, Options& options);
/// @param ranks_name the option for the number of ranks
void add_plan_options(Command command, Options& options,
                      const std::string& ranks_name = "--world-size");
void add_ranks_per_node(Command command, Options& options);
void add_row_options(Command command, Options& options);
void add_run_options(Command command, Options& options);
void add_link_options(Command command, Options& options);
/// Links, and attention.
void add_hardware_options(Command command, Options& options);
void add_trace_option(Command command, Options& options);

/// A check of an option: a whole number of 64 bits without a sign, as it stands. Read as one alone,
/// -1 wraps around, and a number that is too large becomes the largest.
[[nodiscard]] std::string check_seed(const std::string& text);

/// Bytes per second from "50GB/s", "400Gbit/s", "400Gbps", "345" (GB/s); units B, kB, MB, GB, TB,
/// and bit or b in place of B; "ps" or "/s". None when it is something else, or a speed that makes
/// no sense.
[[nodiscard]] std::optional<double> parse_rate(const std::string& text);

/// A check of an option by parse_rate.
[[nodiscard]] std::string check_rate(const std::string& text);

}  // namespace waybill::cli
