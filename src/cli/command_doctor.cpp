#include <algorithm>
#include <memory>
#include <sstream>

#include "checkup.h"
#include "commands.h"
#include "json/writer.h"
#include "step_job.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::cli {
namespace {

struct DoctorOptions {
  bool json = false;
  bool measure = false;
  PythonFacts python;
};

const char* name_of(Diagnosis state) {
  if (state == Diagnosis::good) return "good";
  return state == Diagnosis::note ? "note" : "problem";
}

bool has_problem(const std::vector<CheckLine>& lines) {
  return std::ranges::any_of(
      lines, [](const CheckLine& line) { return line.state == Diagnosis::problem; });
}

std::string as_json(const std::vector<CheckLine>& lines) {
  detail::JsonWriter writer(JsonStyle::readable);
  writer.open_object().header("waybill.doctor");
  writer.key("release").string(WAYBILL_VERSION);
  writer.key("host_id").string(host_id());
  writer.key("works").boolean(!has_problem(lines));
  writer.key("checks").open_list();
  for (const CheckLine& line : lines) {
    writer.open_object(true);
    writer.key("name").string(line.name).key("state").string(name_of(line.state));
    writer.key("value").string(line.value);
    if (!line.advice.empty()) writer.key("advice").string(line.advice);
    writer.close();
  }
  writer.close().close();
  return std::move(writer).finish();
}

/// A value beside its name, in lines as wide as the terminal.
std::string table_line(const std::string& name, const std::string& value) {
  const std::size_t room =
      std::max<std::size_t>(text_width() - std::min(text_width(), name.size()), 16);
  std::string text = name;
  std::size_t used = 0;
  std::istringstream words(value);
  for (std::string word; words >> word;) {
    if (used > 0 && used + 1 + word.size() > room) {
      text += concat("\n", std::string(name.size(), ' '));
      used = 0;
    }
    text += concat(used > 0 ? " " : "", word);
    used += word.size() + (used > 0 ? 1 : 0);
  }
  return text + "\n";
}

std::string as_text(const std::vector<CheckLine>& lines) {
  std::size_t width = 0;
  for (const CheckLine& line : lines) width = std::max(width, line.name.size());
  std::string text = concat("waybill ", WAYBILL_VERSION, " on this host\n");
  std::vector<std::string> advice;
  for (const CheckLine& line : lines) {
    const char* const mark = line.state == Diagnosis::problem ? "! "
                             : line.state == Diagnosis::note  ? "- "
                                                              : "  ";
    text += table_line(concat(mark, line.name, std::string(width - line.name.size() + 2, ' ')),
                       line.value);
    if (!line.advice.empty()) advice.push_back(concat(line.name, ": ", line.advice));
  }
  if (!advice.empty()) text += concat("\nWhat to do\n", sentence_list(advice));
  return concat(
      text, "\n",
      table_line("", has_problem(lines) ? "Something here does not work (!)."
                                        : "Everything that was found works; a line with - "
                                          "matters only if you need it."));
}

int run_doctor(const DoctorOptions& options, Program& program) {
  std::vector<CheckLine> lines = check_host();
  std::ranges::copy(check_python(options.python), std::back_inserter(lines));
  {
    const Progress progress(program.console, options.measure ? "measuring" : "asking");
    std::ranges::copy(check_gpus(options.measure), std::back_inserter(lines));
  }
  program.console.print(options.json ? as_json(lines) : as_text(lines));
  return has_problem(lines) ? exit_failure : exit_good;
}

}  // namespace

void add_doctor_command(Command app, Program& program) {
  auto options = std::make_shared<DoctorOptions>();
  Command command = app.add_command(
      "doctor",
      "Checks what ranks need on this machine, and says what to do about what is missing: GPUs, "
      "peer access, NCCL, NVSHMEM, shared memory, limits, how the host name resolves.");
  command.flag("--json", options->json, "Print JSON");
  command.flag(
      "--measure", options->measure,
      "Also measure the links and memory of the GPUs, which must be idle; takes a few seconds");
  command
      .option("--python", options->python.python,
              "Version of Python to show; python -m waybill passes it")
      .value_name("TEXT");
  command
      .option("--torch", options->python.torch,
              "Version of torch to show; python -m waybill passes it")
      .value_name("TEXT");
  command.footer(
      "Exit: 0 everything that was found works, 1 something that was found does not.\n\n"
      "Examples:\n"
      "  waybill doctor\n"
      "  python -m waybill doctor       with the versions of Python and torch\n"
      "  waybill doctor --measure --json");
  command.when_chosen([options, &program] {
    program.run = [options, &program] { return run_doctor(*options, program); };
  });
}

}  // namespace waybill::cli
