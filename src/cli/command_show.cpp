#include <algorithm>

#include "plans.h"
#include "report/format.h"
#include "routing/homes.h"
#include "waybill/report/plan_summary.h"

namespace waybill::cli {
namespace {

using detail::pad_left;

std::string shard_lines(const QkvPlan& plan, std::int32_t rank) {
  // Where each shard stands in its document.
  std::vector<std::int64_t> document(plan.num_shards());
  std::vector<std::int64_t> position(plan.num_shards());
  std::vector<std::int64_t> first_token(plan.num_shards());
  detail::for_each_place(
      plan, [&](std::int64_t d, std::int32_t place, std::int64_t token, std::int32_t shard) {
        document[shard] = d;
        position[shard] = place;
        first_token[shard] = token;
      });
  std::int64_t row = 0;
  std::string text = concat("Shards of rank ", rank,
                            "\n   shard  first row     tokens  document  place  first token  keys "
                            "from place  attended by\n");
  const std::int64_t end = plan.rank_shard_offsets[rank + 1];
  for (std::int64_t n = plan.rank_shard_offsets[rank]; n < end; ++n) {
    text += concat(
        pad_left(std::to_string(n), 8), pad_left(format_count(row), 11),
        pad_left(format_count(plan.shard_len[n]), 11), pad_left(std::to_string(document[n]), 10),
        pad_left(std::to_string(position[n]), 7), pad_left(format_count(first_token[n]), 13),
        pad_left(std::to_string(plan.first_needed(static_cast<std::int32_t>(n))), 17),
        pad_left(std::to_string(plan.q_dst[n]), 13), "\n");
    row += plan.shard_len[n];
  }
  return text + concat("It attends to the queries of ",
                       std::count(plan.q_dst.begin(), plan.q_dst.end(), rank), " shards.\n");
}

std::string table_line(const char* name, const Metadata& metadata) {
  std::int64_t rows = 0;
  for (const std::int64_t total : metadata.num_total_recv_tokens) {
    require(!__builtin_add_overflow(rows, total, &rows), "show: ", name,
            ": the sum of num_total_recv_tokens exceeds 2^63 - 1");
  }
  return concat("  ", detail::pad_right(name, 8), "dst_rank ", to_string(metadata.dst_rank.shape()),
                ", ", format_count(rows), " rows arrive\n");
}

std::string metadata_text(const Options& options, const Metadata& metadata) {
  if (options.rank < 0) return to_string(metadata) + "\n";
  return to_string(metadata.get_slice(Rank{options.rank})) + "\n";
}

std::string show_bundle(const Options& options, E2eMetadata& bundle) {
  if (!options.table.empty()) return metadata_text(options, table_of(bundle, options.table));
  std::string text = "\nMetadata\n";
  for (const char* name : {"fwd_q", "rev_q", "fwd_kv", "rev_kv"}) {
    const Metadata& table = table_of(bundle, name);
    text += options.rank < 0 ? table_line(name, table)
                             : concat("\n", name, "\n", metadata_text(options, table));
  }
  return text;
}

std::string show_plan(const Options& options, const QkvPlan& plan, const Console& console) {
  if (options.rank >= 0) {
    require(options.rank < plan.world_size, "--rank = ", options.rank, ", expected 0..",
            plan.world_size - 1);
    return shard_lines(plan, options.rank);
  }
  check_routing_size(plan);
  const QkvRouting routing = compute_qkv_routing(plan);
  return text_summary(plan, routing, summarize(plan, routing, options.row_bytes()),
                      console.style(options.gb_per_s));
}

int run_show(const Options& options, Command /*command*/, Program& program) {
  DispatchFile file = read_dispatch_file(options.input, ReadCheck::values);
  std::string text;
  if (file.metadata) {
    if (!options.table.empty())
      throw UsageError(concat("show: --table ", options.table, ": ", input_name(options.input),
                              " has one table, expected a plan or a dispatch"));
    text = metadata_text(options, *file.metadata);
  } else {
    if (!options.table.empty()) (void)file.dense();
    if (options.table.empty()) text = show_plan(options, *file.plan, program.console);
    if (file.bundle) text += show_bundle(options, *file.bundle);
  }
  program.console.print(text);
  return exit_good;
}

std::vector<Finding> findings_of(const Options& options) {
  const DispatchFile file = read_dispatch_file(options.input, ReadCheck::form);
  if (!options.reverse.empty()) {
    const DispatchFile reverse = read_dispatch_file(options.reverse, ReadCheck::form);
    if (!file.metadata || !reverse.metadata)
      throw UsageError("validate: two files must both be metadata, forward and reverse");
    return validate(*file.metadata, *reverse.metadata, options.checks);
  }
  if (file.metadata) return validate(*file.metadata, options.checks);
  if (file.bundle) return validate(*file.plan, *file.bundle, options.checks);

  std::vector<Finding> findings = validate(*file.plan, options.checks);
  if (!findings.empty()) return findings;
  check_routing_size(*file.plan);
  findings = validate(*file.plan, compute_qkv_routing(*file.plan), options.checks);
  return findings.empty() && file.attention ? validate(*file.attention, options.checks) : findings;
}

int run_validate(const Options& options, Command /*command*/, Program& program) {
  const std::vector<Finding> findings =
      with_progress(program.console, "validation", [&] { return findings_of(options); });
  const std::string name = input_name(options.input);
  program.console.print(findings_text(findings, std::ssize(findings)));
  if (findings.empty()) {
    program.console.print(concat(program.console.mark(true), " ", name, ": no findings\n"));
    return exit_good;
  }
  program.console.print_error(
      concat(name, ": ", format_plural(std::ssize(findings), "finding"),
             std::ssize(findings) >= options.checks.max_findings ? " (there may be more)" : ""));
  return exit_failure;
}

}  // namespace

void add_show_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "show", "Prints a plan, a dispatch or metadata in readable form", run_show);
  add_input(command, options, "FILE", "Plan, dispatch or metadata JSON; - is standard input")
      .required();
  add_rank_option(command, options, "Only this rank: its shards and slices");
  add_table_option(command, options);
  add_row_options(command, options);
  command.footer(
      "Examples:\n"
      "  waybill show plan.json --gb-per-s 400\n"
      "  waybill show plan.json --rank 3\n"
      "  waybill show dispatch.json --table rev_kv --rank 0");
}

void add_validate_command(Command app, Program& program) {
  auto [command, options] =
      add_command(app, program, "validate",
                  "Checks a plan, a dispatch or metadata, prints one line for "
                  "each finding, and exits with 1 if "
                  "there is any.",
                  run_validate);
  add_input(command, options, "FILE", "Plan, dispatch or metadata JSON; - is standard input")
      .required();
  command
      .option("REVERSE", options.reverse,
              "Reverse metadata to check against the forward metadata in FILE")
      .value_name("");
  command.option("--q-capacity", options.checks.q_capacity, "Rows of a rank's Q buffer")
      .value_name("N")
      .at_least(0);
  command.option("--kv-capacity", options.checks.kv_capacity, "Rows of a rank's K and V buffers")
      .value_name("N")
      .at_least(0);
  command.option("--max-findings", options.checks.max_findings, "Stop after this many")
      .value_name("N")
      .at_least(1)
      .show_default();
  command.footer(
      "Examples:\n"
      "  waybill validate plan.json\n"
      "  waybill validate dispatch.json --kv-capacity 200000\n"
      "  waybill validate forward.json reverse.json");
}

}  // namespace waybill::cli
