#include <algorithm>
#include <memory>

#include "commands.h"
#include "core/printable.h"
#include "gpu_demo.h"
#include "main_job.h"
#include "plans.h"
#include "report/format.h"
#include "waybill/json/file.h"
#include "waybill/json/plan_json.h"
#include "waybill/report/text_summary.h"

namespace waybill::cli {
namespace {

struct DemoOptions {
  MainJobOptions job;
  std::string html = "waybill-report.html";
  bool no_html = false;
  bool no_simulate = false;
  bool gpus = false;
  int num_sms = 16;
  bool world_size_given = false;
  std::string plan_out;
  StepOutputOptions step;
};

std::string accounted_text(const MainJob& job, const RowOptions& rows) {
  std::string text =
      concat("Bytes below are counted for rows of ", format_bytes(job.summary.row_bytes.q),
             " (Q) and ", format_bytes(job.summary.row_bytes.kv), " (K and V, ", rows.dtype, ")");
  text += job.check ? concat(";\nthe dispatch above was simulated with rows of ",
                             format_bytes(job.payload_bytes), ".\n")
                    : ".\n";
  return text;
}

int run_demo(const DemoOptions& options, Program& program) {
  Console& console = program.console;
  check_outputs({.trace = options.step.trace, .html = options.no_html ? "" : options.html});
  if (!options.plan_out.empty()) require_writable(options.plan_out);
  MainJobOptions job_options = options.job;
  job_options.simulate = !options.no_simulate;
  if (options.gpus) {
    const std::int32_t gpus = require_gpus();
    if (!options.world_size_given) job_options.planning.world_size = std::max(2, gpus);
  }
  console.print("Waybill: from document lengths to a dispatch that is proven right\n\n");
  const MainJob job = run_main_job(job_options, console);

  TextStyle style = console.style();
  style.gb_per_s = job_options.rows.gb_per_s;
  console.print(concat("\n", accounted_text(job, job_options.rows), "\n"));
  console.print(text_summary(job.plan, job.routing, job.summary, style));
  if (!job.attention.relay.hops.empty())
    console.print(concat("\nRelay: ", relay_text(job.attention), ".\n"));
  if (!options.plan_out.empty()) write_plan(options.plan_out, job.plan);
  const bool gpus_right =
      !options.gpus || run_gpu_demo(job.routing, job_options.rows, options.num_sms, console);
  const StepPredictor predictor(job.attention);
  const std::vector<NamedStep> steps =
      compare_transfers(predictor, StepOptions::of(job.attention), job.plan.num_shards());
  console.print(concat("\nPredicted step (", steps.back().name, "): ",
                       format_seconds(steps.back().step.seconds), "; see waybill explain.\n"));
  if (!options.no_html) {
    ReportContext context = report_context(job, job_options, program.command_line);
    context.steps = steps;
    write_file(options.html, html_report(job.plan, job.routing, job.summary, context));
    console.print(concat("\nReport: ", printable_line(options.html), " (open it in a browser)\n"));
  }
  write_trace(options.step, steps, console);
  if (!job.passed() || !gpus_right) {
    console.print_error("the checks above found something wrong");
    return exit_failure;
  }
  return exit_good;
}

}  // namespace

void add_demo_command(Command app, Program& program) {
  auto options = std::make_shared<DemoOptions>();
  Command command = app.add_command(
      "demo",
      "Everything in one run: document lengths -> plan -> metadata -> validation -> dispatch and "
      "return with every byte checked -> summary and HTML report. Needs no arguments.");
  add_source_options(command, options->job.source);
  add_planning_options(command, options->job.planning);
  add_row_options(command, options->job.rows);
  add_simulation_options(command, options->job.simulation);
  const std::string group = "Output";
  const Option html = command.option("--html", options->html, "Where to write the report")
                          .value_name("FILE")
                          .show_default()
                          .group(group);
  command.flag("--no-html", options->no_html, "Write no report").excludes(html).group(group);
  command.flag("--no-simulate", options->no_simulate, "Leave out the byte-checked run")
      .group(group);
  const Option gpus =
      command
          .flag("--gpus", options->gpus,
                "Also run the plan on the GPUs of this host: compare every byte, and print "
                "times beside what links and memory allow. One rank per GPU unless "
                "--world-size says otherwise")
          .group("GPUs");
  command.option("--sms", options->num_sms, "Multiprocessors per rank; 0: copy engines")
      .between(0, 1024)
      .show_default()
      .needs(gpus)
      .group("GPUs");
  add_trace_option(command, options->step);
  command.option("-o,--plan-out", options->plan_out, "Also write the plan as JSON")
      .value_name("FILE")
      .group(group);
  command.footer("Tokens of a corpus: " + corpus_rule() +
                 "\n\n"
                 "Examples:\n"
                 "  waybill demo\n"
                 "  waybill demo --world-size 64 --tokens-per-rank 32768 --gb-per-s 400\n"
                 "  waybill demo --corpus ~/documents --world-size 4 --window 4096\n"
                 "  waybill demo --gpus --world-size 4\n"
                 "  waybill demo --lengths lengths.txt --html run.html -o run.plan.json");
  command.when_chosen([options, command, &program] {
    options->world_size_given = command.is_given("--world-size");
    program.run = [options, &program] { return run_demo(*options, program); };
  });
}

}  // namespace waybill::cli
