#include <memory>

#include "commands.h"
#include "dispatch_file.h"
#include "main_job.h"
#include "plans.h"
#include "report/format.h"

namespace waybill::cli {
namespace {

struct SimulateOptions {
  std::string input;
  SimulationOptions simulation;
  // Without a file: what is planned and predicted.
  SourceOptions source;
  PlanningOptions planning;
  RowOptions rows;
  HardwareOptions hardware;
  StepOutputOptions output;
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

int run_prediction(const SimulateOptions& options, Program& program) {
  Console& console = program.console;
  check_outputs(options.output);
  StepJob job;
  std::vector<NamedStep> steps;
  std::vector<Remedy> remedies;
  {
    const Progress progress(console, "predict");
    job = step_job_of_documents(options.source, options.planning, options.rows, options.hardware);
    const StepPredictor predictor = job.predictor();
    steps = compare_transfers(predictor, job.options, job.plan.num_shards());
    remedies = step_remedies(predictor, steps.back().step);
  }
  for (const std::string& remark : job.remarks) console.print_remark(remark);
  console.print(concat("Predicted, not run: one attention layer, forward and backward\n",
                       job.origin, "\n", hardware_text(job.options), "\n\n", step_table(steps),
                       "\nPhases: what the last rank waited for. Bytes: of the first dispatch.\n\n",
                       steps.back().name, ":\n",
                       sentence_list(explain_step(steps.back().step, remedies))));
  write_step_html(options.output, job, steps, program.command_line, console);
  write_trace(options.output, steps, console);
  return exit_good;
}

int run_simulate(const SimulateOptions& options, Program& program) {
  Console& console = program.console;
  const DispatchFile file = read_plan_file(options.input, ReadCheck::values);
  if (file.bundle) {
    const std::vector<Finding> findings = validate(*file.plan, *file.bundle);
    if (!findings.empty()) {
      console.print(findings_text(findings, 20));
      console.print_error(concat(file.name, ": the metadata is wrong (",
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
                       " query shards saw the ", format_count(check.context_rows_checked),
                       " rows of their context\n", console.mark(check.passed()), " ",
                       check_text(check), "\n"));
  if (check.passed()) return exit_good;
  console.print(findings_text(check.findings, 20));
  console.print_error(concat(file.name, ": the dispatch is wrong"));
  return exit_failure;
}

}  // namespace

void add_simulate_command(Command app, Program& program) {
  auto options = std::make_shared<SimulateOptions>();
  Command command = app.add_command(
      "simulate",
      "With FILE: carries out a plan or dispatch in memory (Q, K and V to the attention layout and "
      "back), checks every byte, and exits with 1 if one is wrong. With --ranks: plans documents "
      "and predicts the time of a step on that many ranks, with and without forwarding.");
  const Option file =
      command
          .option("FILE", options->input, "Plan or dispatch JSON to carry out; - is standard input")
          .value_name("");
  add_simulation_options(command, options->simulation);
  for (Option option : command.options_of({"Byte-checked run"})) option.needs(file);
  add_source_options(command, options->source);
  add_planning_options(command, options->planning, "--ranks,--world-size");
  add_row_options(command, options->rows);
  add_hardware_options(command, options->hardware);
  command.option("--html", options->output.html, "Write a report with the timelines")
      .value_name("FILE")
      .group("Output");
  add_trace_option(command, options->output);
  for (Option option :
       command.options_of({"Documents", "Plan", "Bytes that are counted", "Hardware", "Output"}))
    option.excludes(file);
  command.footer(
      "Examples:\n"
      "  waybill simulate plan.json\n"
      "  waybill simulate dispatch.json --payload-bytes 1024 --threads 2\n"
      "  waybill plan --world-size 16 | waybill simulate -\n"
      "  waybill simulate --ranks 4096 --ranks-per-node 8 --network 50GB/s\n"
      "  waybill simulate --ranks 64 --distribution prolong --trace step.json");
  command.when_chosen([options, command, &program] {
    const bool predict = options->input.empty();
    if (predict && !command.is_given("--ranks"))
      throw UsageError("simulate: FILE is required, or --ranks for a prediction");
    program.run = [options, predict, &program] {
      return predict ? run_prediction(*options, program) : run_simulate(*options, program);
    };
  });
}

}  // namespace waybill::cli
