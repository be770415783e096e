#include <exception>
#include <new>
#include <optional>

#include "program.h"

namespace waybill::cli {
namespace {

/// One word of a command line as a shell would want it.
std::string quoted(const std::string& word) {
  const bool plain =
      !word.empty() && word.find_first_not_of(
                           "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                           "_-+=.,:/@%~") == std::string::npos;
  if (plain) return word;
  std::string result = "'";
  for (const char c : word) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string command_line(int argc, char** argv) {
  std::string result = "waybill";
  for (int i = 1; i < argc; ++i) result += concat(" ", quoted(argv[i]));
  return result;
}

constexpr const char* version = "waybill " WAYBILL_VERSION
#ifdef WAYBILL_CLI_CUDA
                                ", for GPUs: CUDA " WAYBILL_CLI_CUDA
#endif
    ;

void add_commands(Command app, Program& program) {
  app.flag("--progress", program.console.plain_progress,
           "Print progress lines on standard error even if it is not a terminal");
  for (const auto add :
       {add_demo_command, add_plan_command, add_metadata_command, add_simulate_command,
        add_validate_command, add_show_command, add_explain_command, add_compare_command,
        add_experts_command, add_doctor_command, add_calibrate_command})
    add(app, program);
  app.footer(
      "Examples:\n"
      "  waybill demo                                   everything in one run; needs nothing\n"
      "  waybill plan --full -o plan.json               documents -> plan\n"
      "  waybill metadata plan.json -o dispatch.json    plan -> metadata\n"
      "  waybill validate dispatch.json                 what could be wrong with it?\n"
      "  waybill simulate dispatch.json                 carry it out, check every byte\n"
      "  waybill show plan.json --rank 3                read it\n"
      "  waybill explain --world-size 64                how long does a step take, and why?\n"
      "  waybill compare --world-size 64                against static context parallelism\n"
      "  waybill simulate --ranks 4096                  predict a step of a large world\n"
      "  waybill experts --skew 1                       what a mixture of experts sends where\n"
      "  waybill doctor                                 what this machine has, what it lacks\n"
      "  waybill calibrate -o links.json                how fast its links are\n"
      "In the Python package: selftest, bench, cmake-dir (python -m waybill bench --help).\n"
      "Exit: 0 good, 1 failure or findings, 2 wrong usage.");
}

int run(int argc, char** argv, Program& program) {
  const auto app = make_app(
      "waybill", "Waybill routes tokens between ranks: plans, checks and simulates dispatches.",
      version);
  program.command_line = command_line(argc, argv);
  add_commands(Command(app.get()), program);
  if (const std::optional<std::string> shown = parse(*app, argc, argv, text_width())) {
    program.console.print(*shown);
    return exit_good;
  }
  if (!program.run) throw UsageError("a command is needed; waybill --help lists them");
  return program.run();
}

}  // namespace
}  // namespace waybill::cli

int main(int argc, char** argv) {
  using namespace waybill::cli;
  Program program;
  try {
    return run(argc, argv, program);
  } catch (const UsageError& error) {
    program.console.print_error(error.what());
    return exit_usage;
  } catch (const waybill::Interrupted& error) {
    program.console.print_error(error.what());
    return exit_interrupted;
  } catch (const std::bad_alloc&) {
    program.console.print_error("out of memory; ask for fewer tokens, ranks or shards");
    return exit_failure;
  } catch (const std::exception& error) {
    program.console.print_error(error.what());
    return exit_failure;
  }
}
