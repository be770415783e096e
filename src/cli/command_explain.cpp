#include <memory>

#include "commands.h"
#include "plans.h"
#include "report/format.h"

namespace waybill::cli {
namespace {

struct ExplainOptions {
  std::string input;
  SourceOptions source;
  PlanningOptions planning;
  RowOptions rows;
  HardwareOptions hardware;
  StepOutputOptions output;
  std::string transfer = "auto";
  std::int32_t rank = -1;
};

void choose_transfer(const std::string& name, StepJob& job) {
  if (name == "auto") return;
  if (name == "relay" && job.relay.empty())
    throw UsageError("--transfer: relay needs a plan with a relay schedule (plan --full)");
  job.options.transfer = transfer_from_name(name).value_or(TransferMode::direct);  // one of them
}

int run_explain(const ExplainOptions& options, Command command, Program& program) {
  Console& console = program.console;
  check_outputs(options.output);
  const auto is_given = [&](const std::string& name) { return command.is_given(name); };
  StepJob job = options.input.empty() ? step_job_of_documents(options.source, options.planning,
                                                              options.rows, options.hardware)
                                      : step_job_of_file(options.input, options.planning,
                                                         options.rows, options.hardware, is_given);
  choose_transfer(options.transfer, job);
  require(options.rank < job.plan.world_size, "--rank = ", options.rank, ", expected 0..",
          job.plan.world_size - 1);
  for (const std::string& remark : job.remarks) console.print_remark(remark);
  const StepPredictor predictor = job.predictor();
  const StepPrediction step = predictor.predict(job.options);
  console.print(concat(job.origin, "\n", hardware_text(job.options),
                       "\nK and V travel: ", to_string(job.options.transfer), "\n\n"));
  if (options.rank >= 0) {
    console.print(rank_table(step, options.rank));
  } else {
    console.print(phase_table(step) +
                  "\nPhases: what the last rank waited for, one after another\n");
    console.print("\n" + sentence_list(explain_step(step, step_remedies(predictor, step))));
  }
  const std::vector<NamedStep> steps = {
      {std::string(to_string(job.options.transfer)), job.plan.num_shards(), step}};
  write_step_html(options.output, job, steps, program.command_line, console);
  write_trace(options.output, steps, console);
  return exit_good;
}

}  // namespace

void add_explain_command(Command app, Program& program) {
  auto options = std::make_shared<ExplainOptions>();
  Command command = app.add_command(
      "explain",
      "Predicts the step of a plan: how long each phase takes, which rank, document and link make "
      "it slow, and what would help. Nothing is run.");
  const Option file = command
                          .option("FILE", options->input,
                                  "Plan or dispatch JSON; - is standard input. A file of `plan "
                                  "--full` also sets row sizes, nodes, window and relay, unless "
                                  "options do. Without FILE, documents are planned")
                          .value_name("");
  add_source_options(command, options->source);
  add_planning_options(command, options->planning);
  for (Option option : command.options_of({"Documents"})) option.excludes(file);
  for (const char* name :
       {"--world-size", "--tokens-per-rank", "--cut", "--imbalance", "--max-tokens", "--kv-layout"})
    command.option_named(name).excludes(file);
  add_row_options(command, options->rows);
  add_hardware_options(command, options->hardware);
  command
      .option("--transfer", options->transfer,
              "How K and V travel: direct, once_per_node, relay; auto: relay where there is a "
              "schedule")
      .value_name("NAME")
      .one_of({"auto", "direct", "once_per_node", "relay"})
      .show_default()
      .group("Prediction");
  command.option("--rank", options->rank, "Also print the phases of this rank")
      .value_name("N")
      .not_negative()
      .group("Prediction");
  command.option("--html", options->output.html, "Write a report with the timeline")
      .value_name("FILE")
      .group("Output");
  add_trace_option(command, options->output);
  command.footer(
      "Examples:\n"
      "  waybill explain --distribution prolong --world-size 64\n"
      "  waybill explain --world-size 64 --transfer direct --network 400Gbit/s\n"
      "  waybill plan --full --world-size 16 | waybill explain - --trace step.json\n"
      "  waybill explain plan.json --rank 3");
  command.when_chosen([options, command, &program] {
    program.run = [options, command, &program] { return run_explain(*options, command, program); };
  });
}

}  // namespace waybill::cli
