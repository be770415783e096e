#include "options.h"

#include <algorithm>

#include "numbers.h"
#include "program.h"
#include "suggest.h"
#include "waybill/core/dtype.h"
#include "waybill/core/topology.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/json/link_speeds_json.h"

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
  } catch (const InvalidArgument&) {
    std::vector<std::string> known;
    for (const LengthDistribution& one : builtin_length_distributions()) known.push_back(one.name);
    return concat("got ", name, ", expected one of ", distribution_names(),
                  did_you_mean(name, known));
  }
}

std::string check_dtype(const std::string& name) {
  try {
    (void)dtype_from_name(name);
    return "";
  } catch (const InvalidArgument& error) {  // names itself and its argument; those are the user's
    const std::string text = error.what();
    return concat("got ", name, ", ", text.substr(std::min(text.size(), text.find("expected"))));
  }
}

}  // namespace

RowBytes RowOptions::row_bytes() const {
  const std::int64_t element = dtype_bytes(dtype_from_name(dtype));
  return {.q = q_hidden * element, .kv = 2 * kv_hidden * element};
}

void add_source_options(Command command, SourceOptions& options) {
  const std::string group = "Documents";
  const Option distribution =
      command
          .option("--distribution", options.distribution,
                  "Draw lengths from a named distribution (the default): " + distribution_names())
          .value_name("NAME")
          .check(check_distribution)
          .group(group);
  Option lengths = command
                       .option("--lengths", options.lengths_path,
                               "Read lengths in tokens: JSON list or text; - is standard input")
                       .value_name("FILE")
                       .group(group);
  command
      .option(
          "--corpus", options.corpus_path,
          "Count the tokens of all text files in a folder and its subfolders, by the rule below")
      .value_name("DIR")
      .group(group)
      .excludes(distribution)
      .excludes(lengths);
  lengths.excludes(distribution);
  command.option("--seed", options.seed, "Seed of the drawn lengths")
      .value_name("N")
      .check(check_seed)
      .show_default()
      .group(group);
}

namespace {

/// How many ranks there are, and for how many rows of documents they have room.
void add_room_options(Command command, PlanningOptions& options, const std::string& ranks_name,
                      const std::string& group) {
  command.option(ranks_name, options.world_size, "Number of ranks")
      .value_name("N")
      .between(1, max_world_size)
      .show_default()
      .group(group);
  command
      .option("--tokens-per-rank", options.tokens_per_rank,
              "Rows per rank before dispatch; auto: just enough for the documents "
              "(default: 65536 for drawn lengths, else auto). Too few for the documents are an "
              "error, unless --cut")
      .value_name("N|auto")
      .check(number_or_auto(1, most_tokens))
      .group(group);
  command
      .flag("--cut", options.cut,
            "Take the first documents, as many as --tokens-per-rank has room for, cut the last of "
            "them, and leave out the others")
      .group(group);
}

}  // namespace

void add_planning_options(Command command, PlanningOptions& options,
                          const std::string& ranks_name) {
  const std::string group = "Plan";
  add_room_options(command, options, ranks_name, group);
  command
      .option("--imbalance", options.imbalance,
              "Target for the largest work of a rank over the mean; a lower one moves more bytes")
      .value_name("X")
      .check(real_between(1.0001, 1e6))
      .show_default()
      .group(group);
  command
      .option(
          "--mask", options.mask,
          "causal: a query attends to itself and the keys before it; full: to its whole document")
      .value_name("NAME")
      .one_of({"causal", "full"})
      .show_default()
      .group(group);
  command
      .option(
          "--window", options.window,
          "Sliding window: number of keys that a query attends to, its own included; 0: no window")
      .value_name("N")
      .between(0, most_tokens)
      .show_default()
      .group(group);
  command
      .option("--max-tokens", options.max_tokens,
              "Rows of Q, and of K and V, that fit in the buffers of a rank; 0: no limit")
      .value_name("N")
      .between(0, most_tokens)
      .show_default()
      .group(group);
  command
      .option("--ranks-per-node", options.ranks_per_node,
              "Ranks per node, joined by NVLink; nodes are joined by a network")
      .value_name("N")
      .between(1, max_world_size)
      .show_default()
      .group(group);
  command
      .option("--kv-layout", options.kv_layout,
              "per_rank: K and V once on each rank that needs them; per_query: once for every "
              "query shard")
      .value_name("NAME")
      .one_of({"per_rank", "per_query"})
      .show_default()
      .group(group);
}

void add_row_options(Command command, RowOptions& options) {
  const std::string group = "Bytes that are counted";
  constexpr std::int64_t most_hidden = 1 << 24;
  command.option("--q-hidden", options.q_hidden, "Elements of a row of Q")
      .value_name("N")
      .between(1, most_hidden)
      .show_default()
      .group(group);
  command.option("--kv-hidden", options.kv_hidden, "Elements of a row of K, and of V")
      .value_name("N")
      .between(1, most_hidden)
      .show_default()
      .group(group);
  command.option("--dtype", options.dtype, "Type of the elements")
      .value_name("NAME")
      .check(check_dtype)
      .show_default()
      .group(group);
  command
      .option("--gb-per-s", options.gb_per_s,
              "Speed of a rank's link each way, in 1e9 bytes per second; adds times to the output")
      .value_name("X")
      .check(real_between(least_rate / 1e9, most_rate / 1e9))
      .group(group);
}

void add_simulation_options(Command command, SimulationOptions& options) {
  const std::string group = "Byte-checked run";
  command
      .option(
          "--payload-bytes", options.payload_bytes,
          "Bytes of a simulated row (of Q; of K and V together); auto: up to 256, fewer for large "
          "plans")
      .value_name("N|auto")
      .check(number_or_auto(8, 1 << 24))
      .show_default()
      .group(group);
  command.option("--threads", options.num_threads, "Number of threads; 0: all cores")
      .value_name("N")
      .between(0, 4096)
      .show_default()
      .group(group);
}

LinkSpeeds HardwareOptions::speeds() const {
  LinkSpeeds speeds;
  if (!links.empty()) speeds = links_from_json(read_input(links), input_name(links)).speeds;
  if (!nvlink.empty()) speeds.nvlink_bytes_per_second = parse_rate(nvlink).value();
  if (!network.empty()) speeds.network_bytes_per_second = parse_rate(network).value();
  return speeds;
}

HardwareFacts HardwareOptions::facts(HardwareFacts defaults) const {
  const LinkSpeeds given = speeds();
  if (!links.empty() || !nvlink.empty())
    defaults.nvlink_bytes_per_second = given.nvlink_bytes_per_second;
  if (!links.empty() || !network.empty())
    defaults.network_bytes_per_second = given.network_bytes_per_second;
  if (pairs_per_second > 0) defaults.pairs_per_second = pairs_per_second;
  return defaults;
}

void add_link_options(Command command, HardwareOptions& options) {
  const std::string group = "Hardware";
  command
      .option("--links", options.links,
              "Link speeds from a file that waybill calibrate has written; - is standard input. "
              "--nvlink and --network override it")
      .value_name("FILE")
      .group(group);
  command
      .option("--nvlink", options.nvlink,
              "Speed of a rank's NVLink each way, such as 345GB/s (the default, measured on 8 x "
              "H200)")
      .value_name("RATE")
      .check(check_rate)
      .group(group);
  command
      .option("--network", options.network,
              "Speed of a rank's network card each way, such as 50GB/s (the default) or "
              "400Gbit/s")
      .value_name("RATE")
      .check(check_rate)
      .group(group);
}

void add_hardware_options(Command command, HardwareOptions& options) {
  add_link_options(command, options);
  command
      .option(
          "--pairs-per-s", options.pairs_per_second,
          "Attention speed of a rank, forward, in (query, key) pairs per second; default: 600e12 "
          "operations per second, with 4 operations for each pair and element of a row of Q")
      .value_name("X")
      .check(real_between(1, 1e30))
      .group("Hardware");
}

void add_trace_option(Command command, StepOutputOptions& options) {
  command
      .option("--trace", options.trace,
              "Write the predicted timelines for Perfetto or chrome://tracing (JSON)")
      .value_name("FILE")
      .group("Output");
}

}  // namespace waybill::cli
