#include <memory>

#include "documents.h"
#include "options.h"
#include "program.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"

namespace waybill::cli {
namespace {

struct PlanOptions : Options {
  bool full = false;
};

int run_plan(const PlanOptions& options, Program& program) {
  check_outputs({options.output});
  std::string text;
  {
    const Progress progress(program.console, "plan");
    Documents documents = load_documents(options);
    documents.plan.hardware = options.facts(documents.plan.hardware);
    documents.plan.relay = options.full;  // the plan alone has no room for it
    program.console.print_remarks(documents.remarks);
    const AttentionPlan plan = plan_attention(documents.lengths, documents.plan);
    const JsonStyle style = options.compact ? JsonStyle::compact : JsonStyle::readable;
    text = options.full ? to_json(plan, style) : to_json(plan.plan, style);
  }
  write_output(program.console, options.output, text);
  return exit_good;
}

}  // namespace

void add_plan_command(Command app, Program& program) {
  auto options = std::make_shared<PlanOptions>();
  Command command = app.add_command(
      "plan", "Packs documents into ranks and decides who attends to what: even work, few bytes");
  add_document_options(command, *options);
  add_plan_options(command, *options);
  add_row_options(command, *options);
  add_link_options(command, *options);
  command.file("-o,--output", options->output, "Where to write the plan; default: standard output");
  command.flag("--full", options->full,
               "Write all figures and the relay schedule too (waybill.attention_plan)");
  add_compact_flag(command, *options);
  command.footer("Tokens of a corpus: " + corpus_rule() +
                 "\n\n"
                 "Examples:\n"
                 "  waybill plan -o plan.json\n"
                 "  waybill plan --distribution prolong --world-size 64 -o plan.json\n"
                 "  echo 9000 500 4000 | waybill plan --lengths - --world-size 2 --full");
  program.on(command, [options, &program] { return run_plan(*options, program); });
}

}  // namespace waybill::cli
