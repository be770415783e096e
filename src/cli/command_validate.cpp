#include <memory>

#include "plans.h"
#include "report/format.h"

namespace waybill::cli {
namespace {

struct ValidateCommand : Options {
  std::string reverse;
  ValidateOptions checks;
};

std::vector<Finding> findings_of(const ValidateCommand& command) {
  const DispatchFile file = read_dispatch_file(command.input, ReadCheck::form);
  if (!command.reverse.empty()) {
    const DispatchFile reverse = read_dispatch_file(command.reverse, ReadCheck::form);
    if (!file.metadata || !reverse.metadata)
      throw UsageError("validate: two files must both be metadata, forward and reverse");
    return validate(*file.metadata, *reverse.metadata, command.checks);
  }
  if (file.metadata) return validate(*file.metadata, command.checks);
  if (file.bundle) return validate(*file.plan, *file.bundle, command.checks);

  std::vector<Finding> findings = validate(*file.plan, command.checks);
  if (!findings.empty()) return findings;
  check_routing_size(*file.plan);
  findings = validate(*file.plan, compute_qkv_routing(*file.plan), command.checks);
  return findings.empty() && file.attention ? validate(*file.attention, command.checks) : findings;
}

int run_validate(const ValidateCommand& command, Program& program) {
  std::vector<Finding> findings;
  {
    const Progress progress(program.console, "validation");
    findings = findings_of(command);
  }
  const std::string name = input_name(command.input);
  program.console.print(findings_text(findings, findings.size()));
  if (findings.empty()) {
    program.console.print(concat(program.console.mark(true), " ", name, ": no findings\n"));
    return exit_good;
  }
  program.console.print_error(
      concat(name, ": ", format_plural(std::ssize(findings), "finding"),
             std::ssize(findings) >= command.checks.max_findings ? " (there may be more)" : ""));
  return exit_failure;
}

}  // namespace

void add_validate_command(Command app, Program& program) {
  auto options = std::make_shared<ValidateCommand>();
  Command command = app.add_command("validate",
                                    "Checks a plan, a dispatch or metadata, prints one line for "
                                    "each finding, and exits with 1 if "
                                    "there is any.");
  add_input(command, *options, "FILE", "Plan, dispatch or metadata JSON; - is standard input")
      .required();
  command
      .option("REVERSE", options->reverse,
              "Reverse metadata to check against the forward metadata in FILE")
      .value_name("");
  command.option("--q-capacity", options->checks.q_capacity, "Rows of a rank's Q buffer")
      .value_name("N")
      .not_negative();
  command.option("--kv-capacity", options->checks.kv_capacity, "Rows of a rank's K and V buffers")
      .value_name("N")
      .not_negative();
  command.option("--max-findings", options->checks.max_findings, "Stop after this many")
      .value_name("N")
      .positive()
      .show_default();
  command.footer(
      "Examples:\n"
      "  waybill validate plan.json\n"
      "  waybill validate dispatch.json --kv-capacity 200000\n"
      "  waybill validate forward.json reverse.json");
  program.on(command, [options, &program] { return run_validate(*options, program); });
}

}  // namespace waybill::cli
