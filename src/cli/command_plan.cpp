#include "plans.h"
#include "report/format.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"

namespace waybill::cli {
namespace {

JsonStyle style_of(const Options& options) {
  return options.compact ? JsonStyle::compact : JsonStyle::readable;
}

int run_plan(const Options& options, Command /*command*/, Program& program) {
  check_outputs({options.output});
  std::string what;
  const std::string text = with_progress(program.console, "plan", [&] {
    Documents documents = load_documents(options);
    documents.plan.relay = options.full;  // the plan alone has no room for it
    program.console.print_remarks(documents.remarks);
    const AttentionPlan plan = plan_attention(documents.lengths, documents.plan);
    what = concat(options.full ? "a plan with its figures" : "a plan", ", ", documents.origin,
                  ", in ", shards_text(plan.plan), "; largest work ",
                  format_fixed(plan.imbalance(), 3), " x the mean");
    return options.full ? to_json(plan, style_of(options)) : to_json(plan.plan, style_of(options));
  });
  write_output(program.console, options.output, text, what);
  return exit_good;
}

std::string metadata_json(const Options& options, std::string& what) {
  DispatchFile file = read_plan_file(options.input);
  what = concat(options.table.empty() ? "the plan and all tables" : options.table, " of ",
                file.name, ", ", shards_text(*file.plan));
  E2eMetadata& bundle = file.dense();
  if (options.table.empty())
    return to_json(DispatchBundle{std::move(*file.plan), std::move(bundle)}, style_of(options));
  Metadata table = table_of(bundle, options.table);
  if (options.rank >= 0) table = table.get_slice(Rank{options.rank});
  if (options.normalize) table = table.normalize_dtype();
  return to_json(table, style_of(options));
}

int run_metadata(const Options& options, Command /*command*/, Program& program) {
  check_outputs({options.output});
  std::string what;
  const std::string text =
      with_progress(program.console, "metadata", [&] { return metadata_json(options, what); });
  write_output(program.console, options.output, text, what);
  return exit_good;
}

}  // namespace

void add_plan_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "plan",
      "Packs documents into ranks and decides who attends to what: even work, few bytes", run_plan);
  add_document_options(command, options);
  add_plan_options(command, options);
  add_row_options(command, options);
  add_link_options(command, options);
  command.file("-o,--output", options.output, "Where to write the plan; default: standard output");
  command.flag("--full", options.full,
               "Write all figures and the relay schedule too (waybill.attention_plan)");
  add_compact_flag(command, options);
  command.footer("Tokens of a corpus: " + corpus_rule() +
                 "\n\n"
                 "Examples:\n"
                 "  waybill plan -o plan.json\n"
                 "  waybill plan --distribution prolong --world-size 64 -o plan.json\n"
                 "  echo 9000 500 4000 | waybill plan --lengths - --world-size 2 --full");
}

void add_metadata_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "metadata",
      "Computes the metadata of a plan (Q and KV, forward and reverse) and the attention layout, "
      "and writes them as dispatch JSON, with the plan inside",
      run_metadata);
  add_input(command, options, "PLAN", "Plan JSON; - is standard input").required();
  command.file("-o,--output", options.output,
               "Where to write the result; default: standard output");
  const Option table = add_table_option(command, options);
  add_rank_option(command, options, "Only the slice of this rank; needs --table").needs(table);
  command.flag("--normalize", options.normalize, "Use the dtypes of device tables; needs --table")
      .needs(table);
  add_compact_flag(command, options);
  command.footer(
      "Examples:\n"
      "  waybill metadata plan.json -o dispatch.json\n"
      "  waybill plan --world-size 4 | waybill metadata - | waybill validate -\n"
      "  waybill metadata plan.json --table fwd_kv --rank 3 --normalize");
}

}  // namespace waybill::cli
