#include <memory>

#include "commands.h"
#include "expert_ids.h"
#include "numbers.h"
#include "options.h"
#include "report/format.h"
#include "waybill/report/expert_calls.h"
#include "waybill/report/expert_summary.h"

namespace waybill::cli {
namespace {

// Drawing more would take minutes before anything is shown.
constexpr std::int64_t most_drawn_ids = std::int64_t{1} << 31;

struct ExpertsOptions {
  std::string ids_path;
  std::int32_t ranks = 8;
  std::int32_t ranks_per_node = 8;
  std::int32_t experts = 256;
  std::int32_t topk = 8;
  std::int64_t tokens = 4096;
  std::int64_t hidden = 7168;
  std::string dtype = "bfloat16";
  std::string payload = "plain";
  double skew = 0;
  GroupLimit groups;
  std::uint64_t seed = 0;
  ExpertCosts costs;
  std::string path{to_string(ExpertCosts{}.path)};
  HardwareOptions hardware;
};

void check_groups(const ExpertsOptions& o) {
  const auto [groups, top] = o.groups;
  if (o.experts % groups != 0) {
    throw UsageError(
        concat("--groups: ", groups, ", expected a divisor of --experts = ", o.experts));
  }
  if (top > groups) {
    throw UsageError(concat("--top-groups: ", top, ", expected at most --groups = ", groups));
  }
  const std::int64_t open = std::int64_t{o.experts} / groups * top;
  if (o.topk > open) {
    throw UsageError(
        concat("--topk: ", o.topk, ", expected at most ", open, ", the experts of --top-groups"));
  }
}

TopkIds ids_of(const ExpertsOptions& o, Console& console) {
  if (!o.ids_path.empty()) return read_topk_ids(read_input(o.ids_path), input_name(o.ids_path));
  if (o.topk > o.experts) {
    throw UsageError(
        concat("--topk: ", o.topk, ", expected at most ", o.experts, ", the number of experts"));
  }
  check_groups(o);
  if (o.tokens * o.ranks > most_drawn_ids / o.topk) {
    throw UsageError(concat("--tokens: ", o.tokens, " on ", o.ranks, " ranks, expected at most ",
                            most_drawn_ids, " topk slots in all for drawn ids"));
  }
  const Progress progress(console, "draw ids");
  return draw_topk_ids(o.tokens * o.ranks, o.topk, o.experts, o.skew, o.seed, o.groups);
}

std::string origin_of(const ExpertsOptions& o) {
  if (!o.ids_path.empty()) return concat("Choices from ", input_name(o.ids_path));
  std::string text = concat("Choices drawn", o.skew > 0 ? concat(", skew ", o.skew) : "");
  if (o.groups.top_groups < o.groups.num_groups)
    text += concat(", of ", o.groups.top_groups, " of ", o.groups.num_groups, " groups");
  return concat(text, ", seed ", o.seed);
}

int run_experts(const ExpertsOptions& o, Program& program) {
  EPConfig config;
  config.hidden = o.hidden;
  config.num_experts = o.experts;
  config.world_size = o.ranks;
  config.local_world_size = std::min(o.ranks_per_node, o.ranks);
  config.token_dtype = dtype_from_name(o.dtype);
  if (o.experts % o.ranks != 0) {
    throw UsageError(
        concat("--experts: ", o.experts, ", expected a multiple of --ranks = ", o.ranks));
  }
  if (o.ranks % config.local_world_size != 0) {
    throw UsageError(concat("--ranks-per-node: ", o.ranks_per_node, ", expected a divisor of",
                            " --ranks = ", o.ranks));
  }
  EPDispatchOptions options;
  if (o.payload == "float8") options.payload = EPPayload::quantized;
  const TopkIds topk_slots = ids_of(o, program.console);
  const auto ids =
      ids_of_ranks(topk_slots, config, o.ids_path.empty() ? "" : input_name(o.ids_path));
  const ExpertSummary summary = summarize_experts(config, options, ids);
  ExpertCostOptions calls{.links = o.hardware.speeds(), .costs = o.costs};
  calls.costs.path = o.path == "pipelined" ? ExpertPath::pipelined : ExpertPath::waiting;
  const TextStyle& style = program.console.style();
  program.console.print(concat(origin_of(o), "\n\n", expert_text(summary, calls.links, style), "\n",
                               expert_calls_text(config, options, ids, calls, style)));
  return exit_good;
}

void add_layer_options(Command command, ExpertsOptions& o) {
  const std::string group = "Layer";
  const auto number = [&](const char* name, auto& value, std::int64_t least, std::int64_t most,
                          const char* text) {
    return command.option(name, value, text)
        .value_name("N")
        .between(least, most)
        .show_default()
        .group(group);
  };
  number("--ranks,--world-size", o.ranks, 1, max_world_size, "Number of ranks");
  number("--ranks-per-node", o.ranks_per_node, 1, max_world_size,
         "Ranks per node, joined by NVLink; nodes are joined by a network");
  number("--experts", o.experts, 1, std::int32_t{1} << 20,
         "Number of experts, a multiple of --ranks");
  number("--hidden", o.hidden, 1, std::int64_t{1} << 24, "Elements of a token");
  command.option("--dtype", o.dtype, "Type of the elements")
      .value_name("NAME")
      .one_of({"bfloat16", "float16", "float32"})
      .show_default()
      .group(group);
  command
      .option("--payload", o.payload,
              "plain: tokens travel as they are; float8: as e4m3 with one scale per 128 elements")
      .value_name("NAME")
      .one_of({"plain", "float8"})
      .show_default()
      .group(group);
}

void add_id_options(Command command, ExpertsOptions& o) {
  const std::string group = "Choices";
  const Option file =
      command
          .option(
              "--ids", o.ids_path,
              "Text file with a line for each token: the ids of its experts, -1 for a dropped topk "
              "slot. Ranks get equal parts, in order. - is standard input")
          .value_name("FILE")
          .group(group);
  const auto drawn = [&](Option option) { option.show_default().group(group).excludes(file); };
  drawn(command.option("--tokens", o.tokens, "Tokens per rank")
            .value_name("N")
            .between(1, std::int64_t{1} << 24));
  drawn(command.option("--topk", o.topk, "Experts per token, all different")
            .value_name("N")
            .between(1, max_topk));
  drawn(command
            .option("--skew", o.skew,
                    "0: all experts are equally likely; X: the n-th is 1/n^X times as likely as "
                    "the first")
            .value_name("X")
            .check(real_between(0, 10)));
  drawn(command
            .option("--groups", o.groups.num_groups,
                    "Number of groups of consecutive experts, such as one per node")
            .value_name("N")
            .between(1, std::int32_t{1} << 20));
  drawn(command
            .option("--top-groups", o.groups.top_groups,
                    "Most groups that the experts of a token may be in")
            .value_name("N")
            .between(1, std::int32_t{1} << 20));
  drawn(
      command.option("--seed", o.seed, "Seed of the drawn ids").value_name("N").check(check_seed));
}

void add_call_options(Command command, ExpertsOptions& o) {
  const std::string group = "Calls";
  command.option("--sms", o.costs.num_sms, "Multiprocessors (SMs) that a call uses")
      .value_name("N")
      .between(1, 1024)
      .show_default()
      .group(group);
  command
      .option("--path", o.path,
              "Puts over the network: waiting, each for the one before; pipelined, many in flight")
      .value_name("NAME")
      .one_of({"waiting", "pipelined"})
      .show_default()
      .group(group);
}

}  // namespace

void add_experts_command(Command app, Program& program) {
  auto options = std::make_shared<ExpertsOptions>();
  Command command = app.add_command(
      "experts",
      "Analyses the traffic of a mixture of experts: rows and bytes of each rank, what limits "
      "dispatch and combine, how even the experts' work is, whether another placement would help, "
      "and how long each call would take. Nothing is run.");
  add_layer_options(command, *options);
  add_id_options(command, *options);
  add_call_options(command, *options);
  add_link_options(command, options->hardware);
  command.footer(
      "Examples:\n"
      "  waybill experts\n"
      "  waybill experts --skew 1 --payload float8\n"
      "  waybill experts --ranks 64 --network 400Gbit/s\n"
      "  waybill experts --ranks 64 --groups 8 --top-groups 4\n"
      "  waybill experts --ids router.txt --experts 64");
  command.when_chosen([options, &program] {
    program.run = [options, &program] { return run_experts(*options, program); };
  });
}

}  // namespace waybill::cli
