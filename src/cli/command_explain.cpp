#include "plans.h"
#include "report/format.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/cost_model/predict_ulysses.h"
#include "waybill/json/plan_json.h"

#ifdef WAYBILL_CLI_CUDA
#include "cuda/gpu_report.h"
#include "cuda/self_test/self_test.h"
#endif

namespace waybill::cli {
namespace {

void choose_transfer(const std::string& name, StepJob& job) {
  if (name == "auto") return;
  if (name == "relay" && job.relay.empty())
    throw UsageError("--transfer: relay needs a plan with a relay schedule (plan --full)");
  job.options.transfer = transfer_from_name(name).value_or(TransferMode::direct);  // one of them
}

int run_explain(const Options& options, Command command, Program& program) {
  Console& console = program.console;
  check_outputs({options.html, options.trace});
  const auto is_given = [&](const std::string& name) { return command.is_given(name); };
  StepJob job =
      options.input.empty() ? step_job_of_documents(options) : step_job_of_file(options, is_given);
  choose_transfer(options.transfer, job);
  require(options.rank < job.plan.world_size, "--rank = ", options.rank, ", expected 0..",
          job.plan.world_size - 1);
  console.print_remarks(job.remarks);
  const StepPredictor predictor = job.predictor();
  const StepPrediction step = predictor.predict(job.options);
  console.print(concat(job.origin, "\n", hardware_text(job.options),
                       "\nK and V travel: ", to_string(job.options.transfer), "\n\n"));
  if (options.rank >= 0) {
    console.print(rank_table(step, options.rank));
  } else {
    console.print(phase_table(step) +
                  "\nPhases: what the last rank waited for, one after another\n");
    console.print("\n" + sentence_list(explain_step(step, step_remedies(predictor, step))));
  }
  const std::vector<NamedStep> steps = {
      {std::string(to_string(job.options.transfer)), job.plan.num_shards(), step}};
  write_step_reports(options, job, steps, program);
  return exit_good;
}

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

/// The column of the plans that ContextParallelAttention makes.
constexpr std::string_view module_column = "planner";

/// Advice where the plan of the module is slower.
std::string advice(const std::string& by_hand) {
  return by_hand == "Ulysses" ? "split heads here" : "shard by hand here";
}

/// The plan of the module against the fastest way by hand, which come first.
std::string verdict(const std::vector<NamedStep>& steps) {
  const auto module = std::ranges::find(steps, module_column, &NamedStep::name);
  const auto by_hand = std::min_element(
      steps.begin(), module,
      [](const NamedStep& a, const NamedStep& b) { return a.step.seconds < b.step.seconds; });
  const double times = by_hand->step.seconds / module->step.seconds;
  if (times > 0.98 && times < 1.02) return concat("as fast as \"", by_hand->name, "\"");
  if (times > 1) return concat(format_fixed(times, 2), " times as fast as \"", by_hand->name, "\"");
  return concat(format_fixed(1 / times, 2), " times as slow as \"", by_hand->name, "\"; ",
                advice(by_hand->name));
}

std::string verdict_text(const std::vector<NamedStep>& steps) {
  return concat("Verdict: ContextParallelAttention's plan (\"", module_column, "\") is ",
                verdict(steps), ".");
}

/// The heads that Ulysses splits, in a line.
std::string heads_text(const ModelShape& model, std::int64_t head_dim,
                       const std::vector<NamedStep>& steps) {
  const auto heads = heads_of(model, head_dim);
  const std::string of_heads = concat("heads of ", format_count(head_dim), " elements");
  if (!heads) return concat("No Ulysses: rows are not whole ", of_heads);
  const std::string text = concat(of_heads, ": ", format_count(heads->q), ", and ",
                                  format_count(heads->kv), " of K and V");
  const bool found = std::ranges::find(steps, "Ulysses", &NamedStep::name) != steps.end();
  return found ? concat("Ulysses: ", text) : concat("No Ulysses: no group of ranks divides ", text);
}

/// The documents of one world, and the predictions.
std::pair<Documents, std::vector<NamedStep>> compared_on(Options options, std::int64_t world_size) {
  options.world_size = static_cast<std::int32_t>(world_size);
  Documents documents = load_documents(options);
  std::vector<NamedStep> steps = compare_plans(
      documents.lengths,
      {.planner = documents.plan, .degree = options.degree, .head_dim = options.head_dim});
  return {std::move(documents), std::move(steps)};
}

std::string columns_text(const std::vector<NamedStep>& steps) {
  std::vector<std::string> sentences;
  for (const NamedStep& step : steps)
    sentences.push_back(concat("\"", step.name, "\": ", meaning_of_step(step.name)));
  return concat("Columns\n", sentence_list(sentences));
}

void write_compared(const Options& options, const Documents& documents,
                    const std::vector<NamedStep>& steps, Program& program) {
  if (options.html.empty()) return write_trace(options, steps, program.console);
  StepJob job = step_job_of(plan_attention(documents.lengths, documents.plan), documents.origin);
  job.remarks = documents.remarks;
  job.remarks.push_back(heads_text(job.options.model, options.head_dim, steps));
  job.remarks.push_back(verdict_text(steps));
  write_step_reports(options, job, steps, program);
}

void compare_one(const Options& options, std::int64_t world_size, Program& program) {
  Console& console = program.console;
  const auto [documents, steps] =
      with_progress(console, "compare", [&] { return compared_on(options, world_size); });
  console.print_remarks(documents.remarks);
  console.print(concat(documents.origin, ", on ", format_plural(world_size, "rank"), "\n",
                       hardware_text(steps.front().step.options), "\n",
                       heads_text(steps.front().step.options.model, options.head_dim, steps),
                       "\n\n", step_table(steps),
                       "\nPhases: what the last rank waited for. Bytes: of the first "
                       "dispatch.\nWays by hand move all rows before attention.\n\n",
                       columns_text(steps), "\n", sentence_list(comparison_sentences(steps)), "\n",
                       verdict_text(steps), "\n"));
  write_compared(options, documents, steps, program);
}

/// A line for each world: the step of each column, and the verdict.
void compare_several(const Options& options, const std::vector<std::int64_t>& worlds,
                     Console& console) {
  std::vector<std::vector<NamedStep>> rows;
  for (const std::int64_t world_size : worlds) {
    const Progress progress(console, concat("compare on ", format_plural(world_size, "rank")));
    auto [documents, steps] = compared_on(options, world_size);
    console.print_remarks(documents.remarks);
    rows.push_back(std::move(steps));
  }
  const auto of_most = std::ranges::max_element(rows, {}, &std::vector<NamedStep>::size);
  std::string text = detail::pad_left("ranks", 7);
  for (const NamedStep& column : *of_most) text += detail::pad_left(column.name, 15);
  text += concat("  \"", module_column, "\" is\n");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    text += detail::pad_left(std::to_string(worlds[i]), 7);
    for (const NamedStep& column : *of_most) {
      const auto step = std::ranges::find(rows[i], column.name, &NamedStep::name);
      text +=
          detail::pad_left(step == rows[i].end() ? "-" : format_seconds(step->step.seconds), 15);
    }
    text += concat("  ", verdict(rows[i]), "\n");
  }
  const StepOptions& assumed = of_most->front().step.options;
  console.print(concat("Predicted steps\n", hardware_text(assumed), "\n",
                       heads_text(assumed.model, options.head_dim, *of_most), "\n\n", text, "\n",
                       columns_text(*of_most)));
}

int run_compare(const Options& options, Command /*command*/, Program& program) {
  check_outputs({options.html, options.trace});
  const std::vector<std::int64_t> worlds = parse_world_sizes(options.world_sizes).value();
  if (worlds.size() == 1) {
    compare_one(options, worlds.front(), program);
    return exit_good;
  }
  if (!options.html.empty() || !options.trace.empty())
    throw UsageError("--html and --trace need a single --world-size");
  compare_several(options, worlds, program.console);
  return exit_good;
}

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

int run_calibrate(const Options& options, Command /*command*/, Program& program) {
  check_outputs({options.output});
  LinkSpeeds known;
  if (!options.network.empty()) {
    known.network_bytes_per_second = parse_rate(options.network).value();
  }
  const LinkMeasurement links =
      with_progress(program.console, "measuring links", [&] { return measure(known); });
  const std::string text = to_json(links);
  try {
    write_output(program.console, options.output, text,
                 concat("link speeds of ", format_plural(links.num_gpus, "GPU")));
  } catch (const IoError&) {
    program.console.print(text);  // it took too long to be lost
    throw;
  }
  return exit_good;
}

}  // namespace

void add_explain_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "explain",
      "Predicts the step of a plan: how long each phase takes, which rank, document and link make "
      "it slow, and what would help. Nothing is run.",
      run_explain);
  const Option file = add_input(command, options, "FILE",
                                "Plan or dispatch JSON; - is standard input. A file of `plan "
                                "--full` also sets row sizes, nodes, window and relay, unless "
                                "options do. Without FILE, documents are planned");
  add_document_options(command, options);
  add_plan_options(command, options);
  for (Option option : command.options_of({documents_group})) option.excludes(file);
  for (const char* name : {"--world-size", "--tokens-per-rank", "--cut", "--imbalance", "--prefix",
                           "--max-tokens", "--kv-layout"})
    command.option_named(name).excludes(file);
  add_row_options(command, options);
  add_hardware_options(command, options);
  Command prediction = command.under("Prediction");
  prediction.choice(
      "--transfer", options.transfer, {"auto", "direct", "once_per_node", "relay"},
      "How K and V travel: direct, once_per_node, relay; auto: relay where there is a schedule");
  add_rank_option(prediction, options, "Also print the phases of this rank");
  add_report_options(command, options, "Write a report with the timeline");
  command.footer(
      "Examples:\n"
      "  waybill explain --distribution prolong --world-size 64\n"
      "  waybill explain --world-size 64 --transfer direct --network 400Gbit/s\n"
      "  waybill plan --full --world-size 16 | waybill explain - --trace step.json\n"
      "  waybill explain plan.json --rank 3");
}

void add_compare_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "compare",
      "Compares static context parallelism, by zigzag over the packed sequence, for each document "
      "and by heads (Ulysses), with the planner on the same documents: work, bytes and predicted "
      "times side by "
      "side, and a verdict. Nothing is run.",
      run_compare);
  add_document_options(command, options);
  command.under(plan_group)
      .option("--world-size", options.world_sizes,
              "Number of ranks; several, such as 2,4,8,16,32, are a line each")
      .value_name("N,...")
      .check([](const std::string& sizes) {
        if (parse_world_sizes(sizes)) return std::string();
        return concat("got ", sizes, ", expected 1..", max_world_size,
                      ", or several with commas between them");
      })
      .show_default();
  add_plan_options(command, options, "");
  add_row_options(command, options);
  add_hardware_options(command, options);
  command.under(plan_group)
      .option("--degree", options.degree,
              "Ranks in a static context-parallel group, a divisor of the world size; 0: the "
              "largest that fits in a node, and for Ulysses the best")
      .value_name("N")
      .at_least(0)
      .show_default();
  command.under(rows_group)
      .number("--head-dim", options.head_dim, 1, 1 << 20,
              "Elements of a head, of which Ulysses gives each rank some");
  add_report_options(command, options, "Write a report with the timelines");
  command.footer(
      "Examples:\n"
      "  waybill compare\n"
      "  waybill compare --world-size 2,4,8,16,32\n"
      "  waybill compare --world-size 8 --q-hidden 8192 --kv-hidden 1024 --head-dim 128\n"
      "  waybill compare --distribution prolong --world-size 256 --degree 16\n"
      "  echo 300000 5000 5000 | waybill compare --lengths - --world-size 4 --trace steps.json");
}

void add_calibrate_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "calibrate",
      "Measures the links of this machine's GPUs and writes their speeds as JSON, for --links, "
      "World::use_links and waybill.read_links. Nothing else should run on the GPUs meanwhile. "
      "Without such a file, the speeds of 8 x H200 are used.",
      run_calibrate);
  options.output = "-";
  command.file("-o,--output", options.output, "Where to write; -: standard output").show_default();
  add_rate_option(
      command, "--network", options.network,
      "Speed of a rank's network card each way, such as 400Gbit/s; it is written, not measured");
  command.footer(
      "Give all ranks the same file: other speeds may lead to another plan, and ranks compare "
      "their plans.\n\n"
      "Examples:\n"
      "  waybill calibrate -o links.json\n"
      "  waybill explain --links links.json --world-size 64");
}

}  // namespace waybill::cli
