#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <tuple>

#include "plans.h"
#include "report/format.h"
#include "waybill/core/random.h"
#include "waybill/core/topology.h"
#include "waybill/json/file.h"
#include "waybill/moe/ep_config.h"
#include "waybill/report/expert_copies.h"
#include "waybill/report/expert_summary.h"

namespace waybill::cli {
namespace {

// Drawing more would take minutes before anything is shown.
constexpr std::int64_t max_drawn_ids = std::int64_t{1} << 31;
// Rows of a file of counts become ids, and pairs of rank and expert a table of counts.
constexpr std::int64_t max_counted_rows = std::int64_t{1} << 28;
constexpr std::int64_t max_count_cells = std::int64_t{1} << 26;

struct ExpertsOptions : Options {
  std::string ids_path;
  std::string counts_path;
  std::int32_t experts = 256;
  std::int32_t topk = 8;
  std::int64_t tokens = 4096;
  std::int64_t hidden = 7168;
  std::string payload = "plain";
  double skew = 0;
  std::int32_t num_groups = 1;  ///< groups of consecutive experts, all of one size
  std::int32_t top_groups = 1;  ///< a token goes to experts of so many groups at most
  EPDispatchOptions dispatch;   ///< without spare experts no copies are planned
  std::string min_rows = "0";   ///< a copy has so many: a number, or "pays"
  ExpertCopyCosts copy_costs;
  ExpertCosts costs;
  std::string path{to_string(ExpertCosts{}.path)};
};

/// Topk slots of experts, one token after the other.
struct TopkIds {
  std::int32_t topk = 0;
  std::vector<std::int32_t> ids;  ///< [tokens, topk]; -1: dropped
};

/// Numbers with weights, drawn without putting back: sums of weights in a Fenwick tree.
class WeightedUrn {
 public:
  explicit WeightedUrn(const std::vector<std::int64_t>& weights)
      : weights_(weights), sums_(weights.size() + 1) {
    for (std::int64_t i = 0; i < std::ssize(weights); ++i) add(i, weights[i]);
  }

  /// One of those that are left.
  [[nodiscard]] std::int64_t take(Random& random) {
    std::int64_t target = random.below(total_);
    std::int64_t place = 0;  // all numbers before it weigh at most the target
    for (auto step = static_cast<std::int64_t>(std::bit_floor(weights_.size())); step > 0;
         step /= 2) {
      if (place + step >= std::ssize(sums_) || sums_[place + step] > target) continue;
      place += step;
      target -= sums_[place];
    }
    add(place, -weights_[place]);
    return place;
  }

  void put_back(std::int64_t number) { add(number, weights_[number]); }

 private:
  void add(std::int64_t number, std::int64_t weight) {
    total_ += weight;
    for (std::int64_t i = number + 1; i < std::ssize(sums_); i += i & -i) sums_[i] += weight;
  }

  std::vector<std::int64_t> weights_;
  std::vector<std::int64_t> sums_;  ///< [i]: of the lowbit(i) numbers before i
  std::int64_t total_ = 0;
};

/// One line's ids. @throws IoError
void read_line(std::string_view line, const std::string& where, std::vector<std::int32_t>& ids) {
  constexpr std::string_view blanks = " \t,\r";
  while (true) {
    const std::size_t begin = line.find_first_not_of(blanks);
    if (begin == std::string_view::npos) return;
    const std::size_t end = std::min(line.find_first_of(blanks, begin), line.size());
    const std::string word(line.substr(begin, end - begin));
    const std::optional<std::int64_t> id = parse_number(word);
    if (!id || *id < -1 || *id >= std::int64_t{1} << 31)
      throw IoError(concat(where, "got \"", word, "\", expected the number of an expert, or -1"));
    ids.push_back(static_cast<std::int32_t>(*id));
    line.remove_prefix(end);
  }
}

/// JSON: a list with a list of ids for each token, or an object with it as "ids".
TopkIds topk_ids_from_json(const std::string& text, const std::string& name) {
  TopkIds topk_slots;
  const IndexArray table = expert_ids_from(text, name);
  topk_slots.topk = static_cast<std::int32_t>(table.dim(1));
  if (topk_slots.topk > max_topk)
    throw IoError(
        concat(name, ": got ", table.dim(1), " ids a token, expected at most ", max_topk));
  for (const std::int64_t id : table.i64()) {
    if (id < -1 || id >= std::int64_t{1} << 31)
      throw IoError(concat(name, ": got ", id, ", expected the number of an expert, or -1"));
    topk_slots.ids.push_back(static_cast<std::int32_t>(id));
  }
  return topk_slots;
}

/// Text with a token a line: as many ids in each, separated by blanks or commas; -1 is a dropped
/// topk slot; empty lines are passed over.
/// @throws IoError naming line, got and expected
TopkIds read_topk_ids(std::string_view text, const std::string& name) {
  TopkIds topk_slots;
  std::int64_t number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::size_t before = topk_slots.ids.size();
    const std::string where = concat(name, ": line ", ++number, ": ");
    read_line(text.substr(0, end), where, topk_slots.ids);
    text.remove_prefix(std::min(end + 1, text.size()));
    const auto got = static_cast<std::int32_t>(topk_slots.ids.size() - before);
    if (got == 0) continue;
    if (topk_slots.topk == 0) topk_slots.topk = got;
    if (got != topk_slots.topk) {
      throw IoError(concat(where, "got ", got, " ids, expected ", topk_slots.topk,
                           " as in the lines before"));
    }
    if (got > max_topk)
      throw IoError(concat(where, "got ", got, " ids, expected at most ", max_topk));
  }
  if (topk_slots.ids.empty())
    throw IoError(concat(name, ": got no ids, expected one token per line"));
  return topk_slots;
}

/// Distinct experts for each token. With a skew the n-th expert, in an order that is drawn first,
/// is 1 / n^skew as likely as the first (Zipf). A token draws its groups first, all as likely.
TopkIds draw_topk_ids(const ExpertsOptions& o) {
  const std::int64_t num_tokens = o.tokens * o.world_size;
  Random random(o.seed);
  const std::vector<std::int32_t> order = random.permutation(o.experts, o.experts);
  std::vector<std::int64_t> weights(o.experts);
  for (std::int32_t n = 0; n < o.experts; ++n) {
    const double weight = std::pow(n + 1.0, -o.skew) * 0x1p32;
    weights[order[n]] = std::max<std::int64_t>(1, std::llround(weight));
  }
  WeightedUrn urn(weights);
  TopkIds topk_slots{o.topk, {}};
  topk_slots.ids.reserve(num_tokens * o.topk);
  const std::int64_t of_group = o.experts / o.num_groups;
  std::vector<std::int64_t> taken;
  std::vector<bool> open(o.num_groups, true);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    if (o.top_groups < o.num_groups) {
      open.assign(open.size(), false);
      for (const std::int32_t group : random.permutation(o.num_groups, o.top_groups))
        open[group] = true;
    }
    taken.clear();
    for (std::int32_t k = 0; k < o.topk;) {
      taken.push_back(urn.take(random));
      if (!open[taken.back() / of_group]) continue;
      topk_slots.ids.push_back(static_cast<std::int32_t>(taken.back()));
      ++k;
    }
    for (const std::int64_t expert : taken) urn.put_back(expert);
  }
  return topk_slots;
}

/// The tokens in equal parts, the first ranks one more; a dropped topk slot is config.num_experts.
/// Sets max_tokens and topk of the config. @throws IoError for an id that is no expert
std::vector<std::vector<std::int32_t>> ids_of_ranks(const TopkIds& topk_slots, EPConfig& config,
                                                    const std::string& name) {
  const std::int64_t tokens = std::ssize(topk_slots.ids) / topk_slots.topk;
  const std::int64_t world = config.world_size;
  config.topk = topk_slots.topk;
  config.max_tokens = std::max<std::int64_t>(1, (tokens + world - 1) / world);
  std::vector<std::vector<std::int32_t>> ids(world);
  std::int64_t token = 0;
  for (std::int64_t r = 0; r < world; ++r) {
    const std::int64_t end = token + tokens / world + (r < tokens % world ? 1 : 0);
    for (std::int64_t i = token * topk_slots.topk; i < end * topk_slots.topk; ++i) {
      const std::int32_t id = topk_slots.ids[i];
      if (id >= config.num_experts) {
        throw IoError(concat(name, ": token ", i / topk_slots.topk, " has expert ", id,
                             ", expected 0..", config.num_experts - 1, ", or -1"));
      }
      ids[r].push_back(id < 0 ? config.num_experts : id);
    }
    token = end;
  }
  return ids;
}

void check_groups(const ExpertsOptions& o) {
  if (o.experts % o.num_groups != 0) {
    throw UsageError(
        concat("--groups: ", o.num_groups, ", expected a divisor of --experts = ", o.experts));
  }
  if (o.top_groups > o.num_groups) {
    throw UsageError(
        concat("--top-groups: ", o.top_groups, ", expected at most --groups = ", o.num_groups));
  }
  const std::int64_t open = std::int64_t{o.experts} / o.num_groups * o.top_groups;
  if (o.topk > open) {
    throw UsageError(
        concat("--topk: ", o.topk, ", expected at most ", open, ", the experts of --top-groups"));
  }
}

TopkIds ids_of(const ExpertsOptions& o, Console& console) {
  if (!o.ids_path.empty()) {
    const std::string text = read_input(o.ids_path);
    const std::size_t first = text.find_first_not_of(" \t\r\n");
    const bool is_json = first != std::string::npos && (text[first] == '[' || text[first] == '{');
    return is_json ? topk_ids_from_json(text, input_name(o.ids_path))
                   : read_topk_ids(text, input_name(o.ids_path));
  }
  if (o.topk > o.experts) {
    throw UsageError(
        concat("--topk: ", o.topk, ", expected at most ", o.experts, ", the number of experts"));
  }
  check_groups(o);
  if (o.tokens * o.world_size > max_drawn_ids / o.topk) {
    throw UsageError(concat("--tokens: ", o.tokens, " on ", o.world_size,
                            " ranks, expected at most ", max_drawn_ids,
                            " topk slots in all for drawn ids"));
  }
  return with_progress(console, "draw ids", [&] { return draw_topk_ids(o); });
}

/// Rows of each source rank for each expert, [R, E]; sets the numbers of ranks and experts.
/// @throws IoError for a file that is not right, UsageError where an option says another number
std::vector<std::int64_t> read_counts(ExpertsOptions& o, const Command& command) {
  const std::string name = input_name(o.counts_path);
  const IndexArray table = expert_counts_from(read_input(o.counts_path), name);
  for (const auto& [option, field, axis, what] :
       {std::tuple{"--ranks", &o.world_size, 0, "ranks (rows of the table)"},
        {"--experts", &o.experts, 1, "experts (columns of the table)"}}) {
    const std::int64_t got = table.dim(axis);
    if (command.is_given(option) && *field != got)
      throw UsageError(
          concat(option, ": ", *field, ", expected ", got, ", the ", what, " in ", name));
    if (got > (axis == 0 ? max_world_size : std::int32_t{1} << 20))
      throw IoError(concat(name, ": got ", got, " ", what, ", expected at most ",
                           axis == 0 ? max_world_size : std::int32_t{1} << 20));
    *field = static_cast<std::int32_t>(got);
  }
  if (o.experts % o.world_size != 0) {
    throw IoError(concat(name, ": got ", o.experts, " experts, expected a multiple of the ",
                         o.world_size, " ranks"));
  }
  const auto counts = table.i64();
  std::int64_t total = 0;
  for (const std::int64_t rows : counts) {
    if (rows > max_counted_rows || total + rows > max_counted_rows)
      throw IoError(concat(name, ": got more than ", max_counted_rows, " rows in all, expected at",
                           " most so many"));
    total += rows;
  }
  return {counts.begin(), counts.end()};
}

/// Each row is a token of its own, with one topk slot.
std::vector<std::vector<std::int32_t>> ids_of_counts(std::span<const std::int64_t> counts,
                                                     EPConfig& config) {
  std::vector<std::vector<std::int32_t>> ids(config.world_size);
  config.topk = 1;
  config.max_tokens = 1;
  for (std::int32_t r = 0; r < config.world_size; ++r) {
    for (std::int32_t e = 0; e < config.num_experts; ++e)
      ids[r].insert(ids[r].end(), counts[std::int64_t{r} * config.num_experts + e], e);
    config.max_tokens = std::max(config.max_tokens, std::ssize(ids[r]));
  }
  return ids;
}

void check_copies(const ExpertsOptions& o) {
  const std::int32_t spare = o.dispatch.spare_experts;
  if (spare > o.experts) {
    throw UsageError(concat("--spare: ", spare, ", expected at most --experts = ", o.experts));
  }
  if (spare > 0 && std::int64_t{o.world_size} * o.experts > max_count_cells) {
    throw UsageError(concat("--spare: ", o.world_size, " ranks x ", o.experts,
                            " experts, expected at most ", max_count_cells, " pairs"));
  }
}

std::string origin_of(const ExpertsOptions& o) {
  if (!o.counts_path.empty()) {
    return concat("Counts from ", input_name(o.counts_path),
                  "; each row is taken for a token of its own");
  }
  if (!o.ids_path.empty()) return concat("Choices from ", input_name(o.ids_path));
  std::string text = concat("Choices drawn", o.skew > 0 ? concat(", skew ", o.skew) : "");
  if (o.top_groups < o.num_groups)
    text += concat(", of ", o.top_groups, " of ", o.num_groups, " groups");
  return concat(text, ", seed ", o.seed);
}

EPConfig config_of(const ExpertsOptions& o) {
  EPConfig config;
  config.hidden = o.hidden;
  config.num_experts = o.experts;
  config.world_size = o.world_size;
  config.local_world_size = std::min(o.ranks_per_node, o.world_size);
  config.token_dtype = dtype_from_name(o.dtype);
  if (o.experts % o.world_size != 0) {
    throw UsageError(
        concat("--experts: ", o.experts, ", expected a multiple of --ranks = ", o.world_size));
  }
  if (o.world_size % config.local_world_size != 0) {
    throw UsageError(concat("--ranks-per-node: ", o.ranks_per_node, ", expected a divisor of",
                            " --ranks = ", o.world_size));
  }
  check_copies(o);
  return config;
}

/// Plans and prices copies, prints them, and writes the page.
void show_copies(const ExpertsOptions& o, const EPConfig& config, EPDispatchOptions options,
                 const std::vector<std::vector<std::int32_t>>& ids, const ExpertCostOptions& calls,
                 Program& program) {
  ExpertCopyCosts costs = o.copy_costs;
  costs.calls = calls;
  options.min_rows = o.min_rows == "pays"
                         ? break_even_rows(config, costs, {.network = config.num_nodes() > 1})
                         : parse_number(o.min_rows).value();
  const ExpertCopies copies = price_expert_copies(config, options, ids, costs);
  program.console.print("\n" + expert_copies_text(copies, costs, program.console.style()));
  if (o.html.empty()) return;
  ReportContext context;
  context.title =
      concat("Waybill: copies of hot experts on ", format_plural(config.world_size, "rank"));
  context.command = program.command_line;
  context.inputs = {
      {"Choices", origin_of(o)},
      {"Experts", concat(config.hidden, " x ", costs.intermediate, " x 3, ", o.dtype)},
      {"Copies", concat(options.spare_experts, " per rank, limit ", options.limit, ", at least ",
                        options.min_rows, " rows, in tiles of ", options.expert_alignment)},
      {"Links", concat(format_si(calls.links.nvlink_bytes_per_second), "B/s NVLink, ",
                       format_si(calls.links.network_bytes_per_second), "B/s network")}};
  write_html(o, expert_copies_report(copies, costs, context), program.console);
}

std::string assumed_text(const ExpertsOptions& o, const LinkSpeeds& links) {
  const bool by_default = o.links.empty() && o.nvlink.empty() && o.network.empty();
  return concat("Assumed", by_default ? " (as on H200)" : "", ": ",
                format_si(links.nvlink_bytes_per_second), "B/s NVLink, ",
                format_si(links.network_bytes_per_second), "B/s network, ",
                format_plural(o.ranks_per_node, "rank"), " per node");
}

int run_experts(ExpertsOptions o, const Command& command, Program& program) {
  check_outputs({o.html});
  std::vector<std::int64_t> counts;
  if (!o.counts_path.empty()) counts = read_counts(o, command);
  EPConfig config = config_of(o);
  o.dispatch.payload = EPPayload::from_name(o.payload, "--payload");
  const EPDispatchOptions options{.payload = o.dispatch.payload};
  std::vector<std::vector<std::int32_t>> ids;
  if (!counts.empty()) {
    ids = ids_of_counts(counts, config);
  } else {
    ids = ids_of_ranks(ids_of(o, program.console), config,
                       o.ids_path.empty() ? "" : input_name(o.ids_path));
  }
  const ExpertSummary summary = summarize_experts(config, options, ids);
  ExpertCostOptions calls{.links = o.speeds(), .costs = o.costs};
  calls.costs.path = o.path == "pipelined" ? ExpertPath::pipelined : ExpertPath::waiting;
  const TextStyle style = program.console.style();
  program.console.print(concat(origin_of(o), "\n", assumed_text(o, calls.links), "\n\n",
                               expert_text(summary, calls.links, style), "\n",
                               expert_calls_text(config, options, ids, calls, style)));
  if (o.dispatch.spare_experts > 0) show_copies(o, config, o.dispatch, ids, calls, program);
  return exit_good;
}

/// The formats, for --help.
std::string payload_words() {
  std::string words;
  for (const PayloadFormat& format : payload_formats()) {
    if (format.name != "bytes") words += concat(format.name, "|");
  }
  return words + "bytes(ROW,SCALES)";
}

void add_layer_options(Command command, ExpertsOptions& o) {
  command.number("--ranks,--world-size", o.world_size, 1, max_world_size, "Number of ranks");
  add_ranks_per_node(command, o);
  command.number("--experts", o.experts, 1, std::int32_t{1} << 20,
                 "Number of experts, a multiple of --ranks");
  command.number("--hidden", o.hidden, 1, std::int64_t{1} << 24, "Elements of a token");
  command.choice("--dtype", o.dtype, {"bfloat16", "float16", "float32"}, "Type of the elements");
  command
      .option("--payload", o.payload,
              "plain: tokens travel as they are. Else in this format, or as bytes(ROW,SCALES), so "
              "many of a row and of its scales")
      .value_name(payload_words())
      .read_by([](const std::string& name) { (void)EPPayload::from_name(name, "got"); },
               [](const std::string& /*name*/) { return payload_words(); })
      .show_default();
}

void add_drawing_options(Command command, ExpertsOptions& o) {
  command.number("--tokens", o.tokens, 1, std::int64_t{1} << 24, "Tokens per rank");
  command.number("--topk", o.topk, 1, max_topk, "Experts per token, all different");
  command.real(
      "--skew", o.skew, 0, 10,
      "0: all experts are equally likely; X: the n-th is 1/n^X times as likely as the first");
  command.number("--groups", o.num_groups, 1, std::int32_t{1} << 20,
                 "Number of groups of consecutive experts, such as one per node");
  command.number("--top-groups", o.top_groups, 1, std::int32_t{1} << 20,
                 "Most groups that the experts of a token may be in");
  add_seed_option(command, o, "Seed of the drawn ids");
}

void add_id_options(Command command, ExpertsOptions& o) {
  Option counts = command.file(
      "--counts", o.counts_path,
      "Rows of each source rank for each expert, [ranks, experts]: JSON (a list of a list per "
      "rank, or an object with it as \"rows\"), npy, or npz (the array rows, or the only one). It "
      "says --ranks and --experts, too. - is standard input");
  Option file = command.file(
      "--ids", o.ids_path,
      "The ids of each token's experts, -1 for a dropped topk slot: text with a line for each "
      "token, or JSON (a list of a list per token, or an object with it as \"ids\"). Ranks get "
      "equal parts, in order. It says --tokens and --topk, too. - is standard input");
  file.excludes(counts);
  add_drawing_options(command, o);
  for (const char* name : {"--tokens", "--topk", "--skew", "--groups", "--top-groups", "--seed"})
    command.option_named(name).excludes(file).excludes(counts);
}

void add_call_options(Command command, ExpertsOptions& o) {
  command.number("--sms", o.costs.num_sms, 1, 1024, "Multiprocessors (SMs) that a call uses");
  command.choice(
      "--path", o.path, {"waiting", "pipelined"},
      "Puts over the network: waiting, each for the one before; pipelined, many in flight");
}

void add_copy_options(Command command, ExpertsOptions& o) {
  const Option spare = command.number(
      "--spare", o.dispatch.spare_experts, 0, std::int32_t{1} << 20,
      "Slots per rank for copies of other ranks' hot experts: plans copies, and says what they "
      "cost and gain; 0: no copies");
  command
      .real("--limit", o.dispatch.limit, 1, 1e6,
            "The fullest rank may have so many times the lower bound of rows; a higher limit "
            "needs fewer copies")
      .needs(spare);
  command
      .option("--min-rows", o.min_rows,
              "A copy takes at least so many rows; pays: so many that its products outweigh its "
              "transfers where nothing hides these")
      .value_name("N|pays")
      .check([](const std::string& text) -> std::string {
        const std::int64_t rows = text == "pays" ? 0 : parse_number(text).value_or(-1);
        if (0 <= rows && rows <= std::int64_t{1} << 40) return "";
        return concat(text, ", expected a number of rows from 0 to 2^40, or pays");
      })
      .show_default()
      .needs(spare);
  command
      .number("--alignment", o.dispatch.expert_alignment, 1, std::int64_t{1} << 20,
              "Rows of a tile of the experts' products: a copy takes a multiple of it, and each "
              "slot computes whole tiles")
      .needs(spare);
  command
      .number("--intermediate", o.copy_costs.intermediate, 1, std::int64_t{1} << 24,
              "Elements between the products of an expert, which has 3 matrices of --hidden x so "
              "many")
      .needs(spare);
  command
      .real("--flops", o.copy_costs.gemm_flops_per_second, 1, 1e30,
            "Operations per second of a rank's grouped products")
      .needs(spare);
  command.file("--html", o.html, "Write a report with the rows of each rank before and with copies")
      .needs(spare);
}

}  // namespace

void add_experts_command(Command app, Program& program) {
  auto options = std::make_shared<ExpertsOptions>();
  Command command = app.add_command(
      "experts",
      "Analyses the traffic of a mixture of experts: rows and bytes of each rank, what limits "
      "dispatch and combine, how even the experts' work is, whether another placement or copies of "
      "hot experts (--spare) would help, and how long each call would take. Nothing is run.");
  add_layer_options(command.under("Layer"), *options);
  add_id_options(command.under("Choices"), *options);
  add_call_options(command.under("Calls"), *options);
  add_copy_options(command.under("Copies"), *options);
  add_link_options(command, *options);
  command.footer(
      "Examples:\n"
      "  waybill experts\n"
      "  waybill experts --skew 1 --payload float8\n"
      "  waybill experts --ranks 64 --network 400Gbit/s\n"
      "  waybill experts --ranks 64 --groups 8 --top-groups 4\n"
      "  waybill experts --ids router.txt --experts 64\n"
      "  waybill experts --skew 1 --spare 2 --limit 1.02 --alignment 128\n"
      "  waybill experts --counts rows.npz --spare 2 --html copies.html");
  program.on(command,
             [options, command, &program] { return run_experts(*options, command, program); });
}

}  // namespace waybill::cli
