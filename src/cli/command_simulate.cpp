#include "plans.h"
#include "report/format.h"

namespace waybill::cli {
namespace {

// The file's own metadata where it has some, else those of its plan.
QkvRouting routing_of(const DispatchFile& file, int num_threads) {
  check_routing_size(*file.plan);
  if (file.bundle) return to_sparse(*file.plan, *file.bundle);
  return compute_qkv_routing(*file.plan, num_threads);
}

std::string phases_text(const DispatchCheck& check) {
  std::string text;
  for (const CheckPhase& phase : check.phases) {
    text += concat("  ", detail::pad_right(phase.name, 32), format_seconds(phase.seconds));
    if (phase.bytes > 0) text += concat(", ", format_bytes(phase.bytes));
    text += "\n";
  }
  return text;
}

int run_prediction(const Options& options, Program& program) {
  Console& console = program.console;
  check_outputs({options.html, options.trace});
  StepJob job;
  std::vector<NamedStep> steps;
  const std::vector<Remedy> remedies = with_progress(console, "predict", [&] {
    job = step_job_of_documents(options);
    const StepPredictor predictor = job.predictor();
    steps = compare_transfers(predictor, job.options, job.plan.num_shards());
    return step_remedies(predictor, steps.back().step);
  });
  console.print_remarks(job.remarks);
  console.print(concat("Predicted, not run: one attention layer, forward and backward\n",
                       job.origin, "\n", hardware_text(job.options), "\n\n", step_table(steps),
                       "\nPhases: what the last rank waited for. Bytes: of the first dispatch.\n\n",
                       steps.back().name, ":\n",
                       sentence_list(explain_step(steps.back().step, remedies))));
  write_step_reports(options, job, steps, program);
  return exit_good;
}

int run_check(const Options& options, Program& program) {
  Console& console = program.console;
  const DispatchFile file = read_plan_file(options.input);
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
  const QkvRouting routing = routing_of(file, options.num_threads);
  std::int64_t payload_bytes = 0;
  const DispatchCheck check = run_checked(*file.plan, routing, options, console, payload_bytes);
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

int run_simulate(const Options& options, Command command, Program& program) {
  if (!options.input.empty()) return run_check(options, program);
  if (!command.is_given("--ranks"))
    throw UsageError("simulate: FILE is required, or --ranks for a prediction");
  return run_prediction(options, program);
}

}  // namespace

void add_simulate_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "simulate",
      "With FILE: carries out a plan or dispatch in memory (Q, K and V to the attention layout and "
      "back), checks every byte, and exits with 1 if one is wrong. With --ranks: plans documents "
      "and predicts the time of a step on that many ranks, with and without forwarding.",
      run_simulate);
  const Option file = add_input(command, options, "FILE",
                                "Plan or dispatch JSON to carry out; - is standard input");
  add_run_options(command, options);
  for (Option option : command.options_of({run_group})) option.needs(file);
  add_document_options(command, options);
  add_plan_options(command, options, "--ranks,--world-size");
  add_row_options(command, options);
  add_hardware_options(command, options);
  add_report_options(command, options, "Write a report with the timelines");
  for (Option option :
       command.options_of({documents_group, plan_group, rows_group, hardware_group, output_group}))
    option.excludes(file);
  command.footer(
      "Examples:\n"
      "  waybill simulate plan.json\n"
      "  waybill simulate dispatch.json --payload-bytes 1024 --threads 2\n"
      "  waybill plan --world-size 16 | waybill simulate -\n"
      "  waybill simulate --ranks 4096 --ranks-per-node 8 --network 50GB/s\n"
      "  waybill simulate --ranks 64 --distribution prolong --trace step.json");
}

}  // namespace waybill::cli
