#include <CLI/CLI.hpp>
#include <memory>

#include "commands.h"
#include "dispatch_file.h"
#include "main_job.h"
#include "waybill/report/format.h"

namespace waybill::cli {
namespace {

struct SimulateOptions {
  std::string input;
  SimulationOptions simulation;
};

// The file's own metadata where it has some, else those of its plan.
QkvRouting routing_of(const DispatchFile& file, int num_threads) {
  check_routing_size(*file.plan);
  if (file.bundle) return to_sparse(*file.plan, *file.bundle);
  return compute_qkv_routing(*file.plan, num_threads);
}

std::string phases_text(const DispatchCheck& check) {
  std::string text;
  for (const CheckPhase& phase : check.phases) {
    std::string line = concat("  ", phase.name);
    line.resize(std::max<std::size_t>(line.size(), 34), ' ');
    text += concat(line, format_seconds(phase.seconds));
    if (phase.bytes > 0) text += concat(", ", format_bytes(phase.bytes));
    text += "\n";
  }
  return text;
}

int run_simulate(const SimulateOptions& options, Program& program) {
  Console& console = program.console;
  const DispatchFile file = read_plan_file(options.input, ReadCheck::values);
  if (file.bundle) {
    const std::vector<Finding> findings = validate(*file.plan, *file.bundle);
    if (!findings.empty()) {
      console.print(findings_text(findings, 20));
      console.print_error(concat(file.name, ": the metadata are not right (",
                                 format_plural(std::ssize(findings), "finding"),
                                 "), nothing was moved"));
      return exit_failure;
    }
  }
  const QkvRouting routing = routing_of(file, options.simulation.num_threads);
  std::int64_t payload_bytes = 0;
  const DispatchCheck check =
      run_checked(*file.plan, routing, options.simulation, console, payload_bytes);
  console.print(phases_text(check));
  console.print(concat("\n", format_bytes(check.bytes_moved), " moved, ",
                       format_bytes(check.wire_bytes), " of it between ranks, in rows of ",
                       format_bytes(payload_bytes), "\n", format_count(check.queries_checked),
                       " query shards met the ", format_count(check.context_rows_checked),
                       " rows of their context\n", console.mark(check.passed()), " ",
                       check_text(check), "\n"));
  if (check.passed()) return exit_good;
  console.print(findings_text(check.findings, 20));
  console.print_error(concat(file.name, ": the dispatch is not right"));
  return exit_failure;
}

}  // namespace

void add_simulate_command(CLI::App& app, Program& program) {
  auto options = std::make_shared<SimulateOptions>();
  CLI::App* command = app.add_subcommand(
      "simulate",
      "Carries a plan or dispatch out in memory: Q, K and V to the attention layout and back, "
      "every byte checked. Exit 1 when one is wrong.");
  command->add_option("FILE", options->input, "Plan or dispatch JSON; - is standard input")
      ->required()
      ->type_name("");
  add_simulation_options(*command, options->simulation);
  command->footer(
      "Examples:\n"
      "  waybill simulate plan.json\n"
      "  waybill simulate dispatch.json --payload-bytes 1024 --threads 2\n"
      "  waybill plan --world-size 16 | waybill simulate -");
  command->callback([options, &program] {
    program.run = [options, &program] { return run_simulate(*options, program); };
  });
}

}  // namespace waybill::cli
