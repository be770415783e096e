#include <memory>

#include "commands.h"
#include "dispatch_file.h"
#include "waybill/json/dispatch_json.h"
#include "waybill/json/metadata_json.h"

namespace waybill::cli {
namespace {

struct MetadataOptions {
  std::string input;
  std::string output;
  std::string table;
  std::int32_t rank = -1;
  bool normalize = false;
  bool compact = false;
};

std::string metadata_json(const MetadataOptions& options) {
  const JsonStyle style = options.compact ? JsonStyle::compact : JsonStyle::readable;
  DispatchFile file = read_plan_file(options.input, ReadCheck::values);
  if (!file.bundle) {
    check_routing_size(*file.plan);
    const QkvRouting routing = compute_qkv_routing(*file.plan);
    check_dense_size(*file.plan, routing);
    file.bundle = to_dense(routing);
  }
  if (options.table.empty())
    return to_json(DispatchBundle{std::move(*file.plan), std::move(*file.bundle)}, style);
  Metadata table = table_of(*file.bundle, options.table);
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
  command.option("PLAN", options->input, "Plan JSON; - is standard input")
      .required()
      .value_name("");
  command
      .option("-o,--output", options->output, "Where to write the result; default: standard output")
      .value_name("FILE");
  const Option table = command.option("--table", options->table, "Only this table")
                           .value_name("NAME")
                           .one_of({"fwd_q", "rev_q", "fwd_kv", "rev_kv"});
  command.option("--rank", options->rank, "Only the slice of this rank; needs --table")
      .value_name("N")
      .not_negative()
      .needs(table);
  command.flag("--normalize", options->normalize, "Use the dtypes of device tables; needs --table")
      .needs(table);
  command.flag("--compact", options->compact, "JSON without line breaks");
  command.footer(
      "Examples:\n"
      "  waybill metadata plan.json -o dispatch.json\n"
      "  waybill plan --world-size 4 | waybill metadata - | waybill validate -\n"
      "  waybill metadata plan.json --table fwd_kv --rank 3 --normalize");
  command.when_chosen([options, &program] {
    program.run = [options, &program] {
      check_output(options->output);
      std::string text;
      {
        const Progress progress(program.console, "metadata");
        text = metadata_json(*options);
      }
      write_output(program.console, options->output, text);
      return static_cast<int>(exit_good);
    };
  });
}

}  // namespace waybill::cli
