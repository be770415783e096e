#include <memory>

#include "plans.h"
#include "waybill/json/plan_json.h"

namespace waybill::cli {
namespace {

struct MetadataOptions : Options {
  bool normalize = false;
};

std::string metadata_json(const MetadataOptions& options) {
  const JsonStyle style = options.compact ? JsonStyle::compact : JsonStyle::readable;
  DispatchFile file = read_plan_file(options.input, ReadCheck::values);
  E2eMetadata& bundle = file.dense();
  if (options.table.empty())
    return to_json(DispatchBundle{std::move(*file.plan), std::move(bundle)}, style);
  Metadata table = table_of(bundle, options.table);
  if (options.rank >= 0) table = table.get_slice(Rank{options.rank});
  if (options.normalize) table = table.normalize_dtype();
  return to_json(table, style);
}

}  // namespace

void add_metadata_command(Command app, Program& program) {
  auto options = std::make_shared<MetadataOptions>();
  Command command = app.add_command(
      "metadata",
      "Computes the metadata of a plan (Q and KV, forward and reverse) and the attention layout, "
      "and writes them as dispatch JSON, with the plan inside");
  add_input(command, *options, "PLAN", "Plan JSON; - is standard input").required();
  command.file("-o,--output", options->output,
               "Where to write the result; default: standard output");
  const Option table = add_table_option(command, *options);
  add_rank_option(command, *options, "Only the slice of this rank; needs --table").needs(table);
  command.flag("--normalize", options->normalize, "Use the dtypes of device tables; needs --table")
      .needs(table);
  add_compact_flag(command, *options);
  command.footer(
      "Examples:\n"
      "  waybill metadata plan.json -o dispatch.json\n"
      "  waybill plan --world-size 4 | waybill metadata - | waybill validate -\n"
      "  waybill metadata plan.json --table fwd_kv --rank 3 --normalize");
  program.on(command, [options, &program]() -> int {
    check_outputs({options->output});
    std::string text;
    {
      const Progress progress(program.console, "metadata");
      text = metadata_json(*options);
    }
    write_output(program.console, options->output, text);
    return exit_good;
  });
}

}  // namespace waybill::cli
