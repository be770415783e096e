#include "plans.h"

#include "core/printable.h"
#include "dispatch_file.h"
#include "program.h"
#include "report/format.h"
#include "waybill/core/error.h"
#include "waybill/json/attention_plan_json.h"
#include "waybill/json/dispatch_json.h"
#include "waybill/json/file.h"
#include "waybill/planner/planner.h"

namespace waybill::cli {
namespace {

StepJob step_job_of(AttentionPlan plan, std::string origin) {
  StepJob job;
  job.options = StepOptions::of(plan);
  job.origin = std::move(origin);
  job.plan = std::move(plan.plan);
  job.relay = std::move(plan.relay);
  return job;
}

std::string plan_text(const QkvPlan& plan) {
  return concat(format_plural(plan.num_documents(), "document"), " in ",
                format_plural(plan.num_shards(), "shard"), " on ",
                format_plural(plan.world_size, "rank"));
}

}  // namespace

StepJob step_job_of_documents(const SourceOptions& source, const PlanningOptions& planning,
                              const RowOptions& rows, const HardwareOptions& hardware) {
  Documents documents = load_documents(source, planning, rows);
  documents.plan.hardware = hardware.facts(documents.plan.hardware);
  AttentionPlan plan = plan_attention(documents.lengths, documents.plan);
  check_routing_size(plan.plan);
  StepJob job = step_job_of(std::move(plan), documents.origin);
  job.origin += concat(", in ", format_plural(job.plan.num_shards(), "shard"), " on ",
                       format_plural(job.plan.world_size, "rank"));
  job.remarks = std::move(documents.remarks);
  return job;
}

StepJob step_job_of_file(const std::string& path, const PlanningOptions& planning,
                         const RowOptions& rows, const HardwareOptions& hardware,
                         const std::function<bool(const std::string&)>& is_given) {
  const std::string text = read_input(path);
  const std::string name = input_name(path);
  StepJob job;
  const bool has_options = json_format(text, name) == "waybill.attention_plan";
  if (has_options) {
    job = step_job_of(attention_plan_from_json(text, name), name);
  } else {
    job.plan = std::move(*plan_from_text(text, name, ReadCheck::values).plan);
    job.origin = name;
  }
  const auto take = [&](const char* option, auto& field, const auto& value) {
    if (!has_options || is_given(option)) field = value;
  };
  take("--q-hidden", job.options.model.q_hidden, rows.q_hidden);
  take("--kv-hidden", job.options.model.kv_hidden, rows.kv_hidden);
  take("--dtype", job.options.model.dtype, dtype_from_name(rows.dtype));
  take("--window", job.options.mask.window, planning.window);
  if (is_given("--mask")) job.options.mask.kind = mask_from_name("--mask", planning.mask);
  take("--ranks-per-node", job.options.hardware.ranks_per_node, planning.ranks_per_node);
  if (rows.gb_per_s > 0) job.options.hardware.nvlink_bytes_per_second = rows.gb_per_s * 1e9;
  check_routing_size(job.plan);
  job.options.hardware = hardware.facts(job.options.hardware);
  job.origin += concat(": ", plan_text(job.plan));
  return job;
}

std::string hardware_text(const StepOptions& options) {
  const HardwareFacts& facts = options.hardware;
  return concat(format_si(facts.nvlink_bytes_per_second), "B/s NVLink, ",
                format_si(facts.network_bytes_per_second), "B/s network, ",
                format_plural(facts.ranks_per_node, "rank"), " per node; rows of ",
                format_bytes(options.model.q_row_bytes()), " (Q) and ",
                format_bytes(options.model.kv_row_bytes()), " (K and V)");
}

std::string sentence_list(const std::vector<std::string>& sentences) {
  const std::size_t width = text_width() - 2;
  std::string text;
  for (const std::string& sentence : sentences) {
    std::string line = "  -";
    for (std::size_t begin = 0; begin < sentence.size();) {
      const std::size_t end = std::min(sentence.find(' ', begin), sentence.size());
      if (line.size() + 1 + end - begin > width && line.size() > 4) {
        text += line + "\n";
        line = "   ";
      }
      line.append(1, ' ').append(sentence, begin, end - begin);
      begin = end + 1;
    }
    text += line + "\n";
  }
  return text;
}

void check_outputs(const StepOutputOptions& output) {
  for (const std::string& path : {output.html, output.trace}) {
    if (!path.empty()) require_writable(path);
  }
}

void write_trace(const StepOutputOptions& output, const std::vector<NamedStep>& steps,
                 Console& console) {
  if (output.trace.empty()) return;
  write_file(output.trace, chrome_trace(steps));
  console.print(
      concat("\nTrace: ", printable_line(output.trace), " (open it at ui.perfetto.dev)\n"));
}

void write_step_html(const StepOutputOptions& output, const StepJob& job,
                     const std::vector<NamedStep>& steps, const std::string& command,
                     Console& console) {
  if (output.html.empty()) return;
  const QkvRouting routing = compute_qkv_routing(job.plan);
  const RowBytes row_bytes{.q = job.options.model.q_row_bytes(),
                           .kv = job.options.model.kv_row_bytes()};
  ReportContext context;
  context.title = "Waybill: " + plan_text(job.plan);
  context.command = command;
  context.gb_per_s = job.options.hardware.nvlink_bytes_per_second / 1e9;
  context.inputs = {{"Plan", job.origin}, {"Hardware", hardware_text(job.options)}};
  for (const std::string& remark : job.remarks) context.inputs.push_back({"Remark", remark});
  context.steps = steps;
  write_file(output.html,
             html_report(job.plan, routing, summarize(job.plan, routing, row_bytes), context));
  console.print(concat("\nReport: ", printable_line(output.html), " (open it in a browser)\n"));
}

}  // namespace waybill::cli
