#include "main_job.h"

#include <chrono>

#include "dispatch_file.h"
#include "report/format.h"
#include "waybill/planner/planner.h"

namespace waybill::cli {
namespace {

constexpr std::size_t label_width = 12;

/// Runs the steps one after another and prints a line after each.
class Steps {
 public:
  explicit Steps(Console& console) : console_(console) {}

  /// `work` returns what there is to say beside the label.
  template <class Work>
  void run(const std::string& label, const Work& work) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    const std::string text = work();
    const std::chrono::duration<double> seconds = Clock::now() - start;
    const std::string gap(label.size() < label_width ? label_width - label.size() : 1, ' ');
    console_.print(concat("  ", ++num_done_, "  ", label, gap, text, "  [",
                          format_seconds(seconds.count()), "]\n"));
  }

 private:
  Console& console_;
  int num_done_ = 0;
};

void print_findings(Console& console, const std::vector<Finding>& findings) {
  if (!findings.empty()) console.print(findings_text(findings, 10));
}

}  // namespace

MainJob run_main_job(const MainJobOptions& options, Console& console) {
  MainJob job;
  Steps steps(console);
  steps.run("documents", [&] {
    const Progress progress(console, "documents");
    job.documents = load_documents(options.source, options.planning, options.rows);
    std::int64_t total = 0;
    for (const std::int64_t length : job.documents.lengths) total += length;
    return concat(job.documents.origin, ": ", format_plural(total, "token"));
  });
  for (const std::string& remark : job.documents.remarks)
    console.print(concat("     ", std::string(label_width, ' '), remark, "\n"));
  steps.run("plan", [&] {
    const Progress progress(console, "plan");
    job.attention = plan_attention(job.documents.lengths, job.documents.plan);
    job.plan = job.attention.plan;
    check_routing_size(job.plan);
    return concat(format_plural(job.plan.num_shards(), "shard"), " on ",
                  format_plural(job.plan.world_size, "rank"), ", largest work ",
                  format_fixed(job.attention.imbalance(), 3), " x the mean");
  });
  steps.run("metadata", [&] {
    const Progress progress(console, "metadata");
    job.routing = compute_qkv_routing(job.plan, options.simulation.num_threads);
    return concat(
        "Q and KV, forward and reverse: ", format_count(job.routing.fwd_q.num_destinations()),
        " + ", format_count(job.routing.fwd_kv.num_destinations()), " copies of shards");
  });
  steps.run("validation", [&] {
    const Progress progress(console, "validation");
    job.findings = validate(job.plan, job.routing);
    if (job.findings.empty()) job.findings = validate(job.attention);
    return concat(console.mark(job.findings.empty()), " ",
                  format_plural(std::ssize(job.findings), "finding"));
  });
  print_findings(console, job.findings);
  if (options.simulate) {
    steps.run("dispatch", [&] {
      job.check =
          run_checked(job.plan, job.routing, options.simulation, console, job.payload_bytes);
      return concat(console.mark(job.check->passed()), " ", check_text(*job.check));
    });
    print_findings(console, job.check->findings);
  }
  job.summary = summarize(job.plan, job.routing, options.rows.row_bytes());
  if (!job.attention.relay.empty()) {
    job.summary.relay_limit =
        limit_of(job.attention.bytes_in(), job.attention.bytes_out(TransferMode::relay));
  }
  return job;
}

std::string check_text(const DispatchCheck& check) {
  const std::string done = concat(format_count(check.rows_checked), " rows, ",
                                  format_bytes(check.bytes_checked), " compared byte by byte");
  return check.passed() ? done
                        : concat(format_plural(std::ssize(check.findings), "finding"), "; ", done);
}

std::string findings_text(const std::vector<Finding>& findings, std::size_t most) {
  std::string text;
  for (std::size_t i = 0; i < findings.size() && i < most; ++i)
    text += concat(to_string(findings[i]), "\n");
  if (findings.size() > most)
    text += concat(
        "... and ",
        format_plural(std::ssize(findings) - static_cast<std::int64_t>(most), "more finding"),
        "\n");
  return text;
}

}  // namespace waybill::cli
