#include <algorithm>
#include <chrono>
#include <functional>

#include "plans.h"
#include "report/format.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"
#include "waybill/report/plan_summary.h"

#ifdef WAYBILL_CLI_CUDA
#include <array>

#include "cuda/self_test/self_test.h"
#include "waybill/core/wait.h"
#include "waybill/cuda/gpu_world.h"
#endif

namespace waybill::cli {
namespace {

/// The demo's results, step by step.
struct MainJob {
  Documents documents;
  AttentionPlan attention;
  QkvRouting routing;
  std::vector<Finding> findings;
  std::int64_t payload_bytes = 0;      ///< bytes of a simulated row
  std::optional<DispatchCheck> check;  ///< none: not simulated
  PlanSummary summary;

  [[nodiscard]] bool passed() const { return findings.empty() && (!check || check->passed()); }
};

constexpr std::size_t label_width = 12;

/// Document lengths -> plan -> metadata -> validation -> byte-checked dispatch -> figures; a line a
/// step on standard output as it goes.
MainJob run_main_job(const Options& options, Console& console) {
  MainJob job;
  int num_done = 0;
  const auto run = [&](const std::string& label, const std::function<std::string()>& work) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    // The dispatch shows the progress of its phases.
    const std::string text = label == "dispatch" ? work() : with_progress(console, label, work);
    const std::chrono::duration<double> seconds = Clock::now() - start;
    console.print(concat("  ", ++num_done, "  ", detail::pad_right(label, label_width), text, "  [",
                         format_seconds(seconds.count()), "]\n"));
  };
  run("documents", [&] {
    job.documents = load_documents(options);
    std::int64_t total = 0;
    for (const std::int64_t length : job.documents.lengths) total += length;
    return concat(job.documents.origin, ": ", format_plural(total, "token"));
  });
  for (const std::string& remark : job.documents.remarks)
    console.print(concat("     ", std::string(label_width, ' '), remark, "\n"));
  run("plan", [&] {
    job.attention = plan_attention(job.documents.lengths, job.documents.plan);
    check_routing_size(job.attention.plan);
    return concat(shards_text(job.attention.plan), ", largest work ",
                  format_fixed(job.attention.imbalance(), 3), " x the mean");
  });
  run("metadata", [&] {
    job.routing = compute_qkv_routing(job.attention.plan, options.num_threads);
    return concat(
        "Q and KV, forward and reverse: ", format_count(job.routing.fwd_q.num_destinations()),
        " + ", format_count(job.routing.fwd_kv.num_destinations()), " copies of shards");
  });
  run("validation", [&] {
    job.findings = validate(job.attention.plan, job.routing);
    if (job.findings.empty()) job.findings = validate(job.attention);
    return concat(console.mark(job.findings.empty()), " ",
                  format_plural(std::ssize(job.findings), "finding"));
  });
  console.print(findings_text(job.findings, 10));
  if (!options.no_simulate) {
    run("dispatch", [&] {
      job.check = run_checked(job.attention.plan, job.routing, options, console, job.payload_bytes);
      return concat(console.mark(job.check->passed()), " ", check_text(*job.check));
    });
    console.print(findings_text(job.check->findings, 10));
  }
  job.summary = summarize(job.attention.plan, job.routing, options.row_bytes());
  if (!job.attention.relay.empty()) {
    job.summary.relay_limit =
        limit_of(job.attention.bytes_in(), job.attention.bytes_out(TransferMode::relay));
  }
  return job;
}

CheckState state_of(bool good) { return good ? CheckState::passed : CheckState::failed; }

// The first findings follow the line that counts them.
void add_findings(const std::vector<Finding>& findings, std::vector<ReportCheck>& checks) {
  constexpr std::size_t max_lines = 20;
  for (std::size_t i = 0; i < findings.size() && i < max_lines; ++i)
    checks.push_back(
        {std::string(to_string(findings[i].kind)), CheckState::failed, to_string(findings[i])});
}

std::vector<ReportCheck> checks_of(const MainJob& job) {
  std::vector<ReportCheck> checks;
  checks.push_back({"Validation", state_of(job.findings.empty()),
                    concat(format_plural(std::ssize(job.findings), "finding"),
                           ": shapes, ranks, bounds, overlap, coverage, counts, forward against "
                           "reverse, and the keys that each query meets")});
  add_findings(job.findings, checks);
  if (!job.check) {
    checks.push_back({"Byte-checked dispatch", CheckState::not_run, "was not asked for"});
    return checks;
  }
  const DispatchCheck& check = *job.check;
  checks.push_back({"Dispatch of Q, K and V, there and back", state_of(check.passed()),
                    concat(format_bytes(check.bytes_moved), " moved between ",
                           format_plural(job.attention.plan.world_size, "rank"),
                           " in one process, rows of ", format_bytes(job.payload_bytes))});
  checks.push_back({"Every byte", state_of(check.passed()),
                    concat(format_count(check.rows_checked), " rows, ",
                           format_bytes(check.bytes_checked), " compared")});
  checks.push_back(
      {"Keys of every query", state_of(check.passed()),
       concat(format_plural(check.queries_checked, "query shard"), ", ",
              format_count(check.context_rows_checked), " rows of context followed one by one")});
  add_findings(check.findings, checks);
  return checks;
}

/// The effect of forwarding K and V on the largest bytes out and on the limit.
std::string relay_text(const AttentionPlan& plan) {
  const auto largest = [](const std::vector<std::int64_t>& bytes) {
    return format_bytes(*std::max_element(bytes.begin(), bytes.end()));
  };
  return concat("receivers that forward K and V bring the largest bytes out from ",
                largest(plan.bytes_out(TransferMode::direct)), " to ",
                largest(plan.bytes_out(TransferMode::relay)), ", the limit from ",
                format_seconds(plan.limit_seconds(TransferMode::direct)), " to ",
                format_seconds(plan.limit_seconds(TransferMode::relay)));
}

/// All that the report holds besides the figures.
ReportContext report_context(const MainJob& job, const Options& options,
                             const std::string& command) {
  ReportContext context;
  context.title = concat("Waybill: ", format_plural(job.attention.plan.world_size, "rank"), ", ",
                         format_plural(job.attention.plan.num_documents(), "document"));
  context.command = command;
  context.gb_per_s = options.gb_per_s;
  context.checks = checks_of(job);
  context.inputs = {
      {"Documents", job.documents.origin},
      {"Ranks", concat(job.attention.plan.world_size, ", at most ",
                       format_count(job.documents.plan.tokens_per_rank), " tokens each")},
      {"Balance", concat("largest work ", format_fixed(job.attention.imbalance(), 4),
                         " x the mean, aimed at ", job.documents.plan.imbalance_target)},
      {"Mask", to_string(job.documents.plan.mask)},
      {"Relay", relay_text(job.attention)},
      {"KV layout", std::string(to_string(job.attention.plan.kv_layout))},
      {"Bytes counted", concat("Q ", options.q_hidden, ", K and V ", options.kv_hidden,
                               " elements each of ", options.dtype)},
      {"Bytes simulated",
       job.check ? concat(job.payload_bytes, " per row of Q, and of K and V together") : "none"}};
  for (const std::string& remark : job.documents.remarks)
    context.inputs.push_back({"Remark", remark});
  return context;
}

#ifdef WAYBILL_CLI_CUDA
using Cells = std::array<std::string, 7>;
constexpr std::array<std::size_t, 7> widths{13, 13, 13, 11, 11, 11, 0};

std::string line_of(const Cells& cells) {
  std::string line = "  ";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    line += i + 1 < cells.size() ? detail::pad_right(cells[i] + " ", widths[i]) : cells[i];
  }
  return line + "\n";
}

std::string step_line(const GpuSelfTest& self_test, const GpuSelfTestStep& step, Console& console) {
  const double limit_us = self_test.limit_us(step);
  const bool right = step.elements_wrong == 0;
  const std::string wrong =
      right ? "" : concat(", ", format_count(step.elements_wrong), " elements wrong");
  return line_of({step.name, format_bytes(step.link_bytes), format_bytes(step.local_bytes),
                  format_seconds(limit_us * 1e-6), format_seconds(step.median_us * 1e-6),
                  concat(format_fixed(100 * limit_us / step.median_us, 0), " %"),
                  concat(console.mark(right), " ", format_bytes(step.bytes_checked), wrong)});
}

/// GPUs of this host. @throws Unsupported where there is none
std::int32_t require_gpus() {
  const int gpus = num_gpus();
  if (gpus == 0) throw Unsupported("demo --gpus: there is no GPU, or no driver for it");
  return gpus;
}

/// Carries the plan out on the GPUs and prints, for each operation, the time that links and
/// memory allow (measured in the same run), the time that it took, and whether every byte was
/// right.
/// @return whether it was. @throws as try_on_gpus
bool run_gpu_demo(const QkvRouting& routing, const Options& options, Console& console) {
  const std::int32_t num_sms = options.num_sms;
  const DType dtype = dtype_from_name(options.dtype);
  const GpuSelfTest self_test = with_progress(console, "the plan on the GPUs", [&] {
    const EndWaitsOnSigint guard;
    return try_on_gpus(routing, {dtype, options.q_hidden}, {dtype, options.kv_hidden},
                       {.num_sms = num_sms});
  });
  console.print(concat(
      "\nOn the GPUs: ", format_plural(self_test.world_size, "rank"), " on ",
      format_plural(self_test.num_gpus, "GPU"), ", ", num_sms,
      " multiprocessors per rank. Measured now: ",
      self_test.num_gpus > 1
          ? concat("links ", format_fixed(self_test.link_gb_s, 0), " GB/s per GPU and direction, ")
          : "",
      "a copy on one GPU ", format_fixed(self_test.local_gb_s, 0), " GB/s, read and written.\n"));
  console.print(line_of({"", "over a link", "stay", "limit", "measured", "achieved", "compared"}));
  for (const GpuSelfTestStep& step : self_test.steps)
    console.print(step_line(self_test, step, console));
  console.print(
      "  over a link: the most bytes that one GPU sends to, or gets from, the others; stay: that "
      "are\n  copied on one GPU; limit: what takes longer at these rates; measured: the slowest "
      "rank's\n  median of 20 calls.\n");
  return self_test.passed();
}
#else
[[noreturn]] std::int32_t require_gpus() {
  throw Unsupported(
      "demo --gpus: this program was built without CUDA; with CUDA 13: scripts/demo.sh --gpus, or "
      "cmake -DWAYBILL_CUDA=ON");
}

bool run_gpu_demo(const QkvRouting& /*routing*/, const Options& /*options*/, Console& /*console*/) {
  require_gpus();
}
#endif

std::string accounted_text(const MainJob& job, const Options& options) {
  std::string text = concat(
      "Bytes below are counted for rows of ", format_bytes(job.summary.row_bytes.q), " (Q) and ",
      format_bytes(job.summary.row_bytes.kv), " (K and V, ", options.dtype, ")");
  text += job.check ? concat(";\nthe dispatch above was simulated with rows of ",
                             format_bytes(job.payload_bytes), ".\n")
                    : ".\n";
  return text;
}

int run_demo(const Options& given, Command command, Program& program) {
  Console& console = program.console;
  Options options = given;
  if (options.no_html) options.html.clear();
  check_outputs({options.html, options.trace, options.output});
  if (options.gpus) {
    const std::int32_t gpus = require_gpus();
    if (!command.is_given("--world-size")) options.world_size = std::max(2, gpus);
  }
  console.print("Waybill: from document lengths to a dispatch that is proven right\n\n");
  const MainJob job = run_main_job(options, console);

  console.print(concat("\n", accounted_text(job, options), "\n"));
  console.print(
      text_summary(job.attention.plan, job.routing, job.summary, console.style(options.gb_per_s)));
  if (!job.attention.relay.hops.empty())
    console.print(concat("\nRelay: ", relay_text(job.attention), ".\n"));
  if (!options.output.empty()) write_plan(options.output, job.attention.plan);
  const bool gpus_right = !options.gpus || run_gpu_demo(job.routing, options, console);
  const StepPredictor predictor(job.attention);
  const std::vector<NamedStep> steps =
      compare_transfers(predictor, StepOptions::of(job.attention), job.attention.plan.num_shards());
  console.print(concat("\nPredicted step (", steps.back().name,
                       "): ", format_seconds(steps.back().step.seconds), "; see waybill explain.\n",
                       hardware_text(steps.back().step.options), "\n"));
  ReportContext context = report_context(job, options, program.command_line);
  context.steps = steps;
  if (!options.html.empty())
    write_html(options, html_report(job.attention.plan, job.routing, job.summary, context),
               console);
  write_trace(options, steps, console);
  if (!job.passed() || !gpus_right) {
    console.print_error("the checks above found something wrong");
    return exit_failure;
  }
  return exit_good;
}

}  // namespace

void add_demo_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "demo",
      "Everything in one run: document lengths -> plan -> metadata -> validation -> dispatch and "
      "return with every byte checked -> summary and HTML report. Needs no arguments.",
      run_demo);
  options.html = "waybill-report.html";
  add_document_options(command, options);
  add_plan_options(command, options);
  add_row_options(command, options);
  add_run_options(command, options);
  Command output = command.under(output_group);
  const Option html =
      output.file("--html", options.html, "Where to write the report").show_default();
  output.flag("--no-html", options.no_html, "Write no report").excludes(html);
  output.flag("--no-simulate", options.no_simulate, "Leave out the byte-checked run");
  Command on_gpus = command.under("GPUs");
  const Option gpus =
      on_gpus.flag("--gpus", options.gpus,
                   "Also run the plan on the GPUs of this host: compare every byte, and print "
                   "times beside what links and memory allow. One rank per GPU unless "
                   "--world-size says otherwise");
  on_gpus.option("--sms", options.num_sms, "Multiprocessors per rank; 0: copy engines")
      .between(0, 1024)
      .show_default()
      .needs(gpus);
  add_trace_option(command, options);
  output.file("-o,--plan-out", options.output, "Also write the plan as JSON");
  command.footer("Tokens of a corpus: " + corpus_rule() +
                 "\n\n"
                 "Examples:\n"
                 "  waybill demo\n"
                 "  waybill demo --world-size 64 --tokens-per-rank 32768 --gb-per-s 400\n"
                 "  waybill demo --corpus ~/documents --world-size 4 --window 4096\n"
                 "  waybill demo --gpus --world-size 4\n"
                 "  waybill demo --lengths lengths.txt --html run.html -o run.plan.json");
}

}  // namespace waybill::cli
