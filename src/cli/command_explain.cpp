#include <memory>

#include "plans.h"
#include "report/format.h"

namespace waybill::cli {
namespace {

void choose_transfer(const std::string& name, StepJob& job) {
  if (name == "auto") return;
  if (name == "relay" && job.relay.empty())
    throw UsageError("--transfer: relay needs a plan with a relay schedule (plan --full)");
  job.options.transfer = transfer_from_name(name).value_or(TransferMode::direct);  // one of them
}

int run_explain(const Options& options, Command command, Program& program) {
  Console& console = program.console;
  check_outputs({options.html, options.trace});
  const auto is_given = [&](const std::string& name) { return command.is_given(name); };
  StepJob job =
      options.input.empty() ? step_job_of_documents(options) : step_job_of_file(options, is_given);
  choose_transfer(options.transfer, job);
  require(options.rank < job.plan.world_size, "--rank = ", options.rank, ", expected 0..",
          job.plan.world_size - 1);
  console.print_remarks(job.remarks);
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
  write_step_html(options, job, steps, program);
  write_trace(options, steps, console);
  return exit_good;
}

}  // namespace

void add_explain_command(Command app, Program& program) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "explain",
      "Predicts the step of a plan: how long each phase takes, which rank, document and link make "
      "it slow, and what would help. Nothing is run.");
  const Option file = add_input(command, *options, "FILE",
                                "Plan or dispatch JSON; - is standard input. A file of `plan "
                                "--full` also sets row sizes, nodes, window and relay, unless "
                                "options do. Without FILE, documents are planned");
  add_document_options(command, *options);
  add_plan_options(command, *options);
  for (Option option : command.options_of({documents_group})) option.excludes(file);
  for (const char* name :
       {"--world-size", "--tokens-per-rank", "--cut", "--imbalance", "--max-tokens", "--kv-layout"})
    command.option_named(name).excludes(file);
  add_row_options(command, *options);
  add_hardware_options(command, *options);
  Command prediction = command.under("Prediction");
  prediction.choice(
      "--transfer", options->transfer, {"auto", "direct", "once_per_node", "relay"},
      "How K and V travel: direct, once_per_node, relay; auto: relay where there is a schedule");
  add_rank_option(prediction, *options, "Also print the phases of this rank");
  command.under(output_group).file("--html", options->html, "Write a report with the timeline");
  add_trace_option(command, *options);
  command.footer(
      "Examples:\n"
      "  waybill explain --distribution prolong --world-size 64\n"
      "  waybill explain --world-size 64 --transfer direct --network 400Gbit/s\n"
      "  waybill plan --full --world-size 16 | waybill explain - --trace step.json\n"
      "  waybill explain plan.json --rank 3");
  program.on(command,
             [options, command, &program] { return run_explain(*options, command, program); });
}

}  // namespace waybill::cli
