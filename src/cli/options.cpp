#include "options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>

#include "program.h"
#include "waybill/core/dtype.h"
#include "waybill/core/topology.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/json/plan_json.h"

namespace waybill::cli {
namespace {

constexpr std::int64_t max_tokens = std::int64_t{1} << 40;
constexpr std::int64_t max_hidden = 1 << 24;

std::vector<std::string> distribution_names() {
  std::vector<std::string> names;
  for (const LengthDistribution& one : builtin_length_distributions()) names.push_back(one.name);
  return names;
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

/// A whole number of 64 bits without a sign, as it stands. Read as one alone, -1 wraps around, and
/// a number that is too large becomes the largest.
std::string check_seed(const std::string& text) {
  std::uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc() && rest == end) return "";
  return concat("got ", text, ", expected 0..2^64 - 1");
}

std::optional<double> bytes_per_second(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || !std::isfinite(number) || number <= 0) return std::nullopt;
  std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  if (unit.empty()) return number * 1e9;
  if (!unit.ends_with("/s") && !unit.ends_with("ps")) return std::nullopt;
  unit.remove_suffix(2);
  if (unit.ends_with("bit")) {
    unit.remove_suffix(3);
    number /= 8;
  } else if (unit.ends_with("b") || unit.ends_with("B")) {
    if (unit.ends_with("b")) number /= 8;
    unit.remove_suffix(1);
  } else {
    return std::nullopt;
  }
  if (unit.empty()) return number;
  const std::size_t power = std::string_view("kMGT").find(unit);
  if (unit.size() != 1 || power == std::string_view::npos) return std::nullopt;
  return number * std::pow(1000.0, static_cast<double>(power + 1));
}

}  // namespace

RowBytes Options::row_bytes() const {
  const std::int64_t element = dtype_bytes(dtype_from_name(dtype));
  return {.q = q_hidden * element, .kv = 2 * kv_hidden * element};
}

LinkSpeeds Options::speeds() const {
  LinkSpeeds speeds;
  if (!links.empty()) speeds = links_from_json(read_input(links), input_name(links)).speeds;
  if (!nvlink.empty()) speeds.nvlink_bytes_per_second = parse_rate(nvlink).value();
  if (!network.empty()) speeds.network_bytes_per_second = parse_rate(network).value();
  return speeds;
}

HardwareFacts Options::facts(HardwareFacts defaults) const {
  const LinkSpeeds given = speeds();
  if (!links.empty() || !nvlink.empty())
    defaults.nvlink_bytes_per_second = given.nvlink_bytes_per_second;
  if (!links.empty() || !network.empty())
    defaults.network_bytes_per_second = given.network_bytes_per_second;
  if (pairs_per_second > 0) defaults.pairs_per_second = pairs_per_second;
  return defaults;
}

std::pair<Command, Options&> add_command(Command app, Program& program, const std::string& name,
                                         const std::string& text,
                                         int (*work)(const Options&, Command, Program&)) {
  const auto options = std::make_shared<Options>();
  const Command command = app.add_command(name, text);
  program.on(command, [=, &program] { return work(*options, command, program); });
  return {command, *options};
}

Option add_input(Command command, Options& options, const std::string& name,
                 const std::string& text) {
  return command.option(name, options.input, text).value_name("");
}

Option add_table_option(Command command, Options& options) {
  return command.option("--table", options.table, "Only this table")
      .one_of({"fwd_q", "rev_q", "fwd_kv", "rev_kv"});
}

Option add_rank_option(Command command, Options& options, const std::string& text) {
  return command.option("--rank", options.rank, text).value_name("N").at_least(0);
}

void add_compact_flag(Command command, Options& options) {
  command.flag("--compact", options.compact, "JSON without line breaks");
}

void add_document_options(Command command, Options& options) {
  command = command.under(documents_group);
  const Option distribution =
      command
          .option("--distribution", options.distribution,
                  "Draw lengths from a named distribution (the default): " +
                      joined(distribution_names(), ", "))
          .value_name("NAME")
          .read_by(length_distribution, [](const std::string& name) {
            const std::vector<std::string> known = distribution_names();
            return concat("one of ", joined(known, ", "), did_you_mean(name, known));
          });
  Option lengths = command.file("--lengths", options.lengths_path,
                                "Read lengths in tokens: JSON list or text; - is standard input");
  const Option corpus = command
                            .option("--corpus", options.corpus_path,
                                    "Count the tokens of all text files in a folder and its "
                                    "subfolders, by the rule below")
                            .value_name("DIR")
                            .excludes(distribution)
                            .excludes(lengths);
  lengths.excludes(distribution);
  add_seed_option(command, options, "Seed of the drawn lengths").excludes(lengths).excludes(corpus);
}

Option add_seed_option(Command command, Options& options, const std::string& text) {
  return command.option("--seed", options.seed, text)
      .value_name("N")
      .check(check_seed)
      .show_default();
}

void add_ranks_per_node(Command command, Options& options) {
  command.number("--ranks-per-node", options.ranks_per_node, 1, max_world_size,
                 "Ranks per node, joined by NVLink; nodes are joined by a network");
}

void add_plan_options(Command command, Options& options, const std::string& ranks_name) {
  command = command.under(plan_group);
  if (!ranks_name.empty())
    command.number(ranks_name, options.world_size, 1, max_world_size, "Number of ranks");
  command
      .option("--tokens-per-rank", options.tokens_per_rank,
              "Rows per rank before dispatch; auto: just enough for the documents "
              "(default: 65536 for drawn lengths, else auto). Too few for the documents are an "
              "error, unless --cut")
      .value_name("N|auto")
      .between(1, max_tokens, true);
  command.flag(
      "--cut", options.cut,
      "Take the first documents, as many as --tokens-per-rank has room for, cut the last of "
      "them, and leave out the others");
  command.real("--imbalance", options.imbalance, 1.0001, 1e6,
               "Target for the largest work of a rank over the mean; a lower one moves more bytes");
  command.choice(
      "--mask", options.mask, {"causal", "full", "prefix"},
      "causal: a query attends to itself and the keys before it; full: to its whole document; "
      "prefix: as causal, and the first tokens of a document to each other");
  command.number(
      "--window", options.window, 0, max_tokens,
      "Sliding window: number of keys that a query attends to, its own included; 0: no window");
  command.number("--chunk", options.chunk, 0, max_tokens,
                 "Tokens after which a document's attention begins anew: a query meets keys of its "
                 "own chunk alone; 0: no chunks");
  command.number("--prefix", options.prefix, 0, max_tokens,
                 "With --mask prefix: tokens at the beginning of each document that attend to each "
                 "other");
  command.number("--max-tokens", options.max_tokens, 0, max_tokens,
                 "Rows of Q, and of K and V, that fit in the buffers of a rank; 0: no limit");
  add_ranks_per_node(command, options);
  command.choice("--kv-layout", options.kv_layout, {"per_rank", "per_query"},
                 "per_rank: K and V once on each rank that needs them; per_query: once for every "
                 "query shard");
}

void add_row_options(Command command, Options& options) {
  command = command.under(rows_group);
  command.number("--q-hidden", options.q_hidden, 1, max_hidden, "Elements of a row of Q");
  command.number("--kv-hidden", options.kv_hidden, 1, max_hidden,
                 "Elements of a row of K, and of V");
  command.option("--dtype", options.dtype, "Type of the elements")
      .value_name("NAME")
      .check(check_dtype)
      .show_default();
  command
      .option("--gb-per-s", options.gb_per_s,
              "Speed of a rank's link each way, in 1e9 bytes per second; adds times to the output")
      .value_name("X")
      .real_between(LinkSpeeds::least / 1e9, LinkSpeeds::most / 1e9);
}

void add_run_options(Command command, Options& options) {
  command = command.under(run_group);
  command
      .option(
          "--payload-bytes", options.payload_bytes,
          "Bytes of a simulated row (of Q; of K and V together); auto: up to 256, fewer for large "
          "plans")
      .value_name("N|auto")
      .between(8, 1 << 24, true)
      .show_default();
  command.number("--threads", options.num_threads, 0, 4096, "Number of threads; 0: all cores");
}

void add_rate_option(Command command, const std::string& name, std::string& value,
                     const std::string& text) {
  command.option(name, value, text).value_name("RATE").check([](const std::string& rate) {
    if (parse_rate(rate)) return std::string();
    return concat("got ", rate, ", expected a speed such as 50GB/s or 400Gbit/s, from ",
                  LinkSpeeds::least, " to ", LinkSpeeds::most, " bytes per second");
  });
}

void add_link_options(Command command, Options& options) {
  command = command.under(hardware_group);
  command.file("--links", options.links,
               "Link speeds from a file that waybill calibrate has written; - is standard input. "
               "--nvlink and --network override it");
  add_rate_option(command, "--nvlink", options.nvlink,
                  "Speed of a rank's NVLink each way, such as 345GB/s (the default, measured on 8 "
                  "x H200)");
  add_rate_option(command, "--network", options.network,
                  "Speed of a rank's network card each way, such as 50GB/s (the default) or "
                  "400Gbit/s");
}

void add_hardware_options(Command command, Options& options) {
  add_link_options(command, options);
  command.under(hardware_group)
      .option(
          "--pairs-per-s", options.pairs_per_second,
          "Attention speed of a rank, forward, in (query, key) pairs per second; default: 350e12 "
          "operations per second, with 4 operations for each pair and element of a row of Q")
      .value_name("X")
      .real_between(1, 1e30);
}

void add_trace_option(Command command, Options& options) {
  command.under(output_group)
      .file("--trace", options.trace,
            "Write the predicted timelines for Perfetto or chrome://tracing (JSON)");
}

void add_report_options(Command command, Options& options, const std::string& html_text) {
  command.under(output_group).file("--html", options.html, html_text);
  add_trace_option(command, options);
}

std::optional<std::vector<std::int64_t>> parse_world_sizes(const std::string& text) {
  std::vector<std::int64_t> numbers;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::optional<std::int64_t> number = parse_number(text.substr(begin, end - begin));
    if (!number || *number < 1 || *number > max_world_size) return std::nullopt;
    numbers.push_back(*number);
    begin = end + 1;
  }
  return numbers;
}

std::optional<double> parse_rate(const std::string& text) {
  const std::optional<double> rate = bytes_per_second(text);
  return rate && LinkSpeeds::makes_sense(*rate) ? rate : std::nullopt;
}

}  // namespace waybill::cli
