#include "job_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "console.h"
#include "numbers.h"
#include "waybill/core/dtype.h"
#include "waybill/core/topology.h"
#include "waybill/json/length_distribution_json.h"

namespace waybill::cli {
namespace {

constexpr std::int64_t most_tokens = std::int64_t{1} << 40;

std::string distribution_names() {
  std::string names;
  for (const LengthDistribution& distribution : builtin_length_distributions())
    names += (names.empty() ? "" : ", ") + distribution.name;
  return names;
}

std::string check_distribution(const std::string& name) {
  try {
    (void)length_distribution(name);
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

// CLI11 alone would let -1 wrap around.
std::string check_seed(const std::string& text) {
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  return digits ? "" : concat("got ", text, ", expected 0..2^64 - 1");
}

std::string check_dtype(const std::string& name) {
  try {
    (void)dtype_from_name(name);
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

}  // namespace

RowBytes RowOptions::row_bytes() const {
  const std::int64_t element = dtype_bytes(dtype_from_name(dtype));
  return {.q = q_hidden * element, .kv = 2 * kv_hidden * element};
}

void add_source_options(CLI::App& command, SourceOptions& options) {
  const std::string group = "Documents";
  auto* distribution = command
                           .add_option("--distribution", options.distribution,
                                       "Draw lengths from a named distribution (the default): " +
                                           distribution_names())
                           ->type_name("NAME")
                           ->check(check_distribution)
                           ->group(group);
  auto* lengths = command
                      .add_option("--lengths", options.lengths_path,
                                  "Read lengths in tokens: JSON list or text; - is standard input")
                      ->type_name("FILE")
                      ->group(group);
  command
      .add_option("--corpus", options.corpus_path,
                  "Count the tokens of all text files below a folder; the rule is below")
      ->type_name("DIR")
      ->group(group)
      ->excludes(distribution)
      ->excludes(lengths);
  lengths->excludes(distribution);
  command.add_option("--seed", options.seed, "Seed of the drawn lengths")
      ->type_name("N")
      ->check(check_seed)
      ->capture_default_str()
      ->group(group);
}

void add_planning_options(CLI::App& command, PlanningOptions& options,
                          const std::string& ranks_name) {
  const std::string group = "Plan";
  command.add_option(ranks_name, options.world_size, "Number of ranks")
      ->type_name("N")
      ->check(CLI::Range(std::int32_t{1}, max_world_size))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--tokens-per-rank", options.tokens_per_rank,
                  "Rows of a rank before dispatch, or auto: just enough for the documents "
                  "(default: 65536 for drawn lengths, else auto)")
      ->type_name("N|auto")
      ->check(number_or_auto(1, most_tokens))
      ->group(group);
  command
      .add_option("--imbalance", options.imbalance,
                  "Largest work of a rank over the mean that is aimed at; tighter costs bytes")
      ->type_name("X")
      ->check(real_between(1.0001, 1e6))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--window", options.window,
                  "Sliding window: keys that a query meets, itself included; 0: all before it")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{0}, most_tokens))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--max-tokens", options.max_tokens,
                  "Rows of Q, and of K and V, that a rank's buffers hold; 0: no limit")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{0}, most_tokens))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--ranks-per-node", options.ranks_per_node,
                  "Ranks of a node, joined by NVLink; nodes are joined by a network")
      ->type_name("N")
      ->check(CLI::Range(std::int32_t{1}, max_world_size))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--kv-layout", options.kv_layout,
                  "per_rank: K and V once on each rank that needs them; per_query: once for every "
                  "query shard")
      ->type_name("NAME")
      ->check(CLI::IsMember({"per_rank", "per_query"}))
      ->capture_default_str()
      ->group(group);
}

void add_row_options(CLI::App& command, RowOptions& options) {
  const std::string group = "Bytes that are counted";
  constexpr std::int64_t most_hidden = 1 << 24;
  command.add_option("--q-hidden", options.q_hidden, "Elements of a row of Q")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{1}, most_hidden))
      ->capture_default_str()
      ->group(group);
  command.add_option("--kv-hidden", options.kv_hidden, "Elements of a row of K, and of V")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{1}, most_hidden))
      ->capture_default_str()
      ->group(group);
  command.add_option("--dtype", options.dtype, "Type of the elements")
      ->type_name("NAME")
      ->check(check_dtype)
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--gb-per-s", options.gb_per_s,
                  "Speed of a rank's link each way, in 1e9 bytes a second: adds times")
      ->type_name("X")
      ->check(real_between(least_rate / 1e9, most_rate / 1e9))
      ->group(group);
}

void add_simulation_options(CLI::App& command, SimulationOptions& options) {
  const std::string group = "Byte-checked run";
  command
      .add_option("--payload-bytes", options.payload_bytes,
                  "Bytes of a simulated row of Q, and of K and V together; auto: up to 256, less "
                  "for large plans")
      ->type_name("N|auto")
      ->check(number_or_auto(8, 1 << 24))
      ->capture_default_str()
      ->group(group);
  command.add_option("--threads", options.num_threads, "Threads, 0 for all cores")
      ->type_name("N")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str()
      ->group(group);
}

HardwareFacts HardwareOptions::facts(HardwareFacts defaults) const {
  if (!nvlink.empty()) defaults.nvlink_bytes_per_second = parse_rate(nvlink).value();
  if (!network.empty()) defaults.network_bytes_per_second = parse_rate(network).value();
  if (pairs_per_second > 0) defaults.pairs_per_second = pairs_per_second;
  return defaults;
}

void add_link_options(CLI::App& command, HardwareOptions& options) {
  const std::string group = "Hardware";
  command
      .add_option(
          "--nvlink", options.nvlink,
          "Speed of a rank's NVLink each way, such as 345GB/s (the default, measured on 8 x "
          "H200)")
      ->type_name("RATE")
      ->check(check_rate)
      ->group(group);
  command
      .add_option("--network", options.network,
                  "Speed of a rank's network card each way, such as 50GB/s (the default) or "
                  "400Gbit/s")
      ->type_name("RATE")
      ->check(check_rate)
      ->group(group);
}

void add_hardware_options(CLI::App& command, HardwareOptions& options) {
  add_link_options(command, options);
  command
      .add_option("--pairs-per-s", options.pairs_per_second,
                  "(query, key) pairs that a rank attends to in a second, forward; default: 600e12 "
                  "operations a second, 4 for each pair and element of a row of Q")
      ->type_name("X")
      ->check(real_between(1, 1e30))
      ->group("Hardware");
}

void add_trace_option(CLI::App& command, StepOutputOptions& options) {
  command
      .add_option("--trace", options.trace,
                  "Write the predicted timelines for Perfetto or chrome://tracing (JSON)")
      ->type_name("FILE")
      ->group("Output");
}

void exclude_groups(CLI::App& command, CLI::Option* other, const std::vector<std::string>& groups) {
  for (CLI::Option* option : command.get_options()) {
    if (std::find(groups.begin(), groups.end(), option->get_group()) != groups.end())
      option->excludes(other);
  }
}

}  // namespace waybill::cli
