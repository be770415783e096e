#include <memory>

#include "documents.h"
#include "plans.h"
#include "report/format.h"
#include "waybill/cost_model/predict_step.h"

namespace waybill::cli {
namespace {

std::string lower_first(std::string text) {
  text[0] = static_cast<char>(text[0] | 0x20);  // ASCII letters
  return text;
}

// The last one is the planner's best.
std::vector<std::string> comparison_sentences(const std::vector<NamedStep>& steps) {
  std::vector<std::string> sentences;
  const NamedStep& best = steps.back();
  for (const NamedStep& other : steps) {
    if (&other == &best) continue;
    const bool faster = other.step.seconds >= best.step.seconds;
    const double times =
        faster ? other.step.seconds / best.step.seconds : best.step.seconds / other.step.seconds;
    const std::string compared =
        times < 1.005 ? "as fast as \""
                      : concat(format_fixed(times, 2),
                               faster ? " times as fast as \"" : " times as slow as \"");
    sentences.push_back(concat("\"", best.name, "\" is ", compared, other.name, "\". Of \"",
                               other.name, "\": ", lower_first(explain_step(other.step)[1])));
  }
  sentences.push_back(concat("Of \"", best.name, "\": ", lower_first(explain_step(best.step)[1])));
  return sentences;
}

int run_compare(const Options& options, Program& program) {
  Console& console = program.console;
  check_outputs({options.trace});
  std::vector<NamedStep> steps;
  Documents documents;
  {
    const Progress progress(console, "compare");
    documents = load_documents(options);
    documents.plan.hardware = options.facts(documents.plan.hardware);
    console.print_remarks(documents.remarks);
    steps = compare_plans(documents.lengths, {.planner = documents.plan, .degree = options.degree});
  }
  console.print(concat(documents.origin, ", on ", format_plural(documents.plan.world_size, "rank"),
                       "\n", hardware_text(steps.front().step.options), "\n\n", step_table(steps),
                       "\nPhases: what the last rank waited for. Bytes: of the first "
                       "dispatch.\nKeys move before attention "
                       "in static plans too: nothing overlaps.\n\n",
                       sentence_list(comparison_sentences(steps))));
  write_trace(options, steps, console);
  return exit_good;
}

}  // namespace

void add_compare_command(Command app, Program& program) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "compare",
      "Compares static zigzag context parallelism, sharding of each document, and the planner on "
      "the same documents: work, bytes and predicted times side by side.");
  add_document_options(command, *options);
  add_plan_options(command, *options);
  add_row_options(command, *options);
  add_hardware_options(command, *options);
  command.under(plan_group)
      .option("--degree", options->degree,
              "Ranks in a static context-parallel group, a divisor of the world size; 0: the "
              "largest that fits in a node")
      .value_name("N")
      .not_negative()
      .show_default();
  add_trace_option(command, *options);
  command.footer(
      "Examples:\n"
      "  waybill compare\n"
      "  waybill compare --distribution prolong --world-size 256 --degree 16\n"
      "  echo 300000 5000 5000 | waybill compare --lengths - --world-size 4 --trace steps.json");
  program.on(command, [options, &program] { return run_compare(*options, program); });
}

}  // namespace waybill::cli
