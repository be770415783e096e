#include <memory>
#include <string>

#include "options.h"
#include "program.h"
#include "waybill/json/plan_json.h"

#ifdef WAYBILL_CLI_CUDA
#include "cuda/gpu_report.h"
#include "cuda/self_test/self_test.h"
#endif

namespace waybill::cli {
namespace {

#ifdef WAYBILL_CLI_CUDA
LinkMeasurement measure(const LinkSpeeds& known) {
  const GpuReport report = report_gpus();
  LinkMeasurement links;
  links.num_gpus = static_cast<int>(report.gpus.size());
  if (links.num_gpus > 0) links.device = report.gpus.front().name;
  links.speeds = measure_links(links.num_gpus, known);
  return links;
}
#else
LinkMeasurement measure(const LinkSpeeds& /*known*/) {
  throw Unsupported("calibrate: this program was built without CUDA, and measures links of GPUs");
}
#endif

int run_calibrate(const Options& options, Program& program) {
  check_outputs({options.output});
  LinkSpeeds known;
  if (!options.network.empty()) {
    known.network_bytes_per_second = parse_rate(options.network).value();
  }
  LinkMeasurement links;
  {
    const Progress progress(program.console, "measuring links");
    links = measure(known);
  }
  const std::string text = to_json(links);
  try {
    write_output(program.console, options.output, text);
  } catch (const IoError&) {
    program.console.print(text);  // it took too long to be lost
    throw;
  }
  return exit_good;
}

}  // namespace

void add_calibrate_command(Command app, Program& program) {
  auto options = std::make_shared<Options>();
  options->output = "-";
  Command command = app.add_command(
      "calibrate",
      "Measures the links of this machine's GPUs and writes their speeds as JSON, for --links, "
      "World::use_links and waybill.read_links. Nothing else should run on the GPUs meanwhile. "
      "Without such a file, the speeds of 8 x H200 are used.");
  command.file("-o,--output", options->output, "Where to write; -: standard output").show_default();
  command
      .option(
          "--network", options->network,
          "Speed of a rank's network card each way, such as 400Gbit/s; it is written, not measured")
      .value_name("RATE")
      .check(check_rate);
  command.footer(
      "Give all ranks the same file: other speeds may lead to another plan, and ranks compare "
      "their plans.\n\n"
      "Examples:\n"
      "  waybill calibrate -o links.json\n"
      "  waybill explain --links links.json --world-size 64");
  program.on(command, [options, &program] { return run_calibrate(*options, program); });
}

}  // namespace waybill::cli
