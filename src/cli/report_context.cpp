#include <algorithm>

#include "main_job.h"
#include "report/format.h"

namespace waybill::cli {
namespace {

CheckState state_of(bool good) { return good ? CheckState::passed : CheckState::failed; }

// The first findings follow the line that counts them.
void add_findings(const std::vector<Finding>& findings, std::vector<ReportCheck>& checks) {
  constexpr std::size_t most = 20;
  for (std::size_t i = 0; i < findings.size() && i < most; ++i)
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
                           format_plural(job.plan.world_size, "rank"), " in one process, rows of ",
                           format_bytes(job.payload_bytes))});
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

}  // namespace

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

ReportContext report_context(const MainJob& job, const MainJobOptions& options,
                             const std::string& command) {
  ReportContext context;
  context.title = concat("Waybill: ", format_plural(job.plan.world_size, "rank"), ", ",
                         format_plural(job.plan.num_documents(), "document"));
  context.command = command;
  context.gb_per_s = options.rows.gb_per_s;
  context.checks = checks_of(job);
  context.inputs = {
      {"Documents", job.documents.origin},
      {"Ranks", concat(job.plan.world_size, ", at most ",
                       format_count(job.documents.plan.tokens_per_rank), " tokens each")},
      {"Balance", concat("largest work ", format_fixed(job.attention.imbalance(), 4),
                         " x the mean, aimed at ", job.documents.plan.imbalance_target)},
      {"Mask", to_string(job.documents.plan.mask)},
      {"Relay", relay_text(job.attention)},
      {"KV layout", std::string(to_string(job.plan.kv_layout))},
      {"Bytes counted", concat("Q ", options.rows.q_hidden, ", K and V ", options.rows.kv_hidden,
                               " elements each of ", options.rows.dtype)},
      {"Bytes simulated",
       job.check ? concat(job.payload_bytes, " per row of Q, and of K and V together") : "none"}};
  for (const std::string& remark : job.documents.remarks)
    context.inputs.push_back({"Remark", remark});
  return context;
}

}  // namespace waybill::cli
