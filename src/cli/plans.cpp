#include "plans.h"

#include <unistd.h>

#include <algorithm>
#include <memory>

#include "core/printable.h"
#include "report/format.h"
#include "routing/homes.h"
#include "waybill/json/file.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"

namespace waybill::cli {
namespace {

/// Throws unless the dense form, which has W x (W + 1) and W x S x C entries, can be written.
void check_dense_size(const QkvPlan& plan, const QkvRouting& routing) {
  constexpr std::int64_t max_cells = std::int64_t{1} << 27;
  const std::int64_t max_shards = detail::largest_part(plan.rank_shard_offsets);
  const std::int64_t max_entries =
      std::max({max_shards, detail::largest_part(routing.rev_q.rank_offsets),
                detail::largest_part(routing.rev_kv.rank_offsets)});
  const std::int64_t max_copies =
      std::max<std::int64_t>(1, detail::largest_part(routing.fwd_kv.copy_offsets));
  const double world = plan.world_size;
  const double cells = world * (world + 1) + world * static_cast<double>(max_entries) +
                       world * static_cast<double>(max_shards) * static_cast<double>(max_copies);
  if (cells > static_cast<double>(max_cells)) {
    throw Unsupported(concat("the dense form needs about ", format_si(cells),
                             " entries per table, at most ",
                             format_si(static_cast<double>(max_cells)),
                             " are written as JSON; work with the plan, which is small"));
  }
}

std::string plan_text(const QkvPlan& plan) {
  return concat(format_plural(plan.num_documents(), "document"), " in ", shards_text(plan));
}

/// Bytes that the check keeps in memory at the same time, for rows of `payload_bytes`.
double footprint(const QkvPlan& plan, const QkvRouting& routing, std::int64_t payload_bytes) {
  double written_rows = 0;  // K and V: at home, in the attention layout, and back in planes
  double plane_rows = 0;    // places in the planes; one nobody writes costs only its number
  for (std::size_t rank = 0; rank + 1 < plan.rank_shard_offsets.size(); ++rank) {
    double home_rows = 0;
    std::int64_t max_copies = 0;
    const std::int64_t end = plan.rank_shard_offsets[rank + 1];
    for (std::int64_t n = plan.rank_shard_offsets[rank]; n < end; ++n) {
      const auto rows = static_cast<double>(plan.shard_len[n]);
      const std::int64_t copies =
          routing.fwd_kv.destination_end(n) - routing.fwd_kv.destination_begin(n);
      home_rows += rows;
      written_rows += rows * static_cast<double>(1 + 2 * copies);
      max_copies = std::max(max_copies, copies);
    }
    plane_rows += home_rows * static_cast<double>(max_copies);
  }
  return written_rows * static_cast<double>(payload_bytes) + plane_rows * sizeof(std::int64_t);
}

}  // namespace

std::string shards_text(const QkvPlan& plan) {
  return concat(format_plural(plan.num_shards(), "shard"), " on ",
                format_plural(plan.world_size, "rank"));
}

E2eMetadata& DispatchFile::dense() {
  if (!bundle) {
    check_routing_size(*plan);
    const QkvRouting routing = compute_qkv_routing(*plan);
    check_dense_size(*plan, routing);
    bundle = to_dense(routing);
  }
  return *bundle;
}

DispatchFile read_dispatch_file(const std::string& path, ReadCheck check) {
  DispatchFile file;
  file.name = input_name(path);
  const std::string text = read_input(path);
  const std::string format = json_format(text, file.name);
  if (format == "waybill.plan") {
    file.plan = plan_from_json(text, file.name, check);
  } else if (format == "waybill.attention_plan") {
    file.attention = attention_plan_from_json(text, file.name, check);
    file.plan = file.attention->plan;
  } else if (format == "waybill.dispatch") {
    DispatchBundle bundle = dispatch_from_json(text, file.name, check);
    file.plan = std::move(bundle.plan);
    file.bundle = std::move(bundle.metadata);
  } else if (format == "waybill.metadata") {
    file.metadata = metadata_from_json(text, file.name, check);
  } else {
    throw IoError(concat(file.name, ": /format = \"", format,
                         "\", expected waybill.plan, waybill.attention_plan, waybill.dispatch or "
                         "waybill.metadata"));
  }
  return file;
}

DispatchFile read_plan_file(const std::string& path) {
  DispatchFile file = read_dispatch_file(path, ReadCheck::values);
  if (!file.plan) {
    throw IoError(concat(file.name,
                         ": /format = \"waybill.metadata\", expected waybill.plan, "
                         "waybill.attention_plan or waybill.dispatch"));
  }
  return file;
}

Metadata& table_of(E2eMetadata& metadata, std::string_view name) {
  if (name == "fwd_q") return metadata.fwd_q;
  if (name == "rev_q") return metadata.rev_q;
  return name == "fwd_kv" ? metadata.fwd_kv : metadata.rev_kv;
}

void check_routing_size(const QkvPlan& plan) {
  const auto d = detail::document_of_too_many_copies(plan);
  if (!d) return;
  const std::int64_t n = std::ssize(detail::shards_of(plan, *d));
  throw Unsupported(concat("the plan may need more than ", format_count(detail::max_kv_copies),
                           " copies of KV shards (document ", *d, " has ", format_count(n),
                           " shards); use fewer shards, or --kv-layout per_rank"));
}

StepJob step_job_of(AttentionPlan plan, std::string origin) {
  StepJob job;
  job.options = StepOptions::of(plan);
  job.origin = std::move(origin);
  job.plan = std::move(plan.plan);
  job.relay = std::move(plan.relay);
  return job;
}

StepJob step_job_of_documents(const Options& options) {
  Documents documents = load_documents(options);
  AttentionPlan plan = plan_attention(documents.lengths, documents.plan);
  check_routing_size(plan.plan);
  StepJob job = step_job_of(std::move(plan), documents.origin);
  job.origin += concat(", in ", shards_text(job.plan));
  job.remarks = std::move(documents.remarks);
  return job;
}

StepJob step_job_of_file(const Options& options,
                         const std::function<bool(const std::string&)>& is_given) {
  DispatchFile file = read_plan_file(options.input);
  const bool has_options = file.attention.has_value();
  StepJob job;
  if (has_options) {
    job = step_job_of(std::move(*file.attention), file.name);
  } else {
    job.plan = std::move(*file.plan);
    job.origin = file.name;
  }
  const auto take = [&](const char* option, auto& field, const auto& value) {
    if (!has_options || is_given(option)) field = value;
  };
  take("--q-hidden", job.options.model.q_hidden, options.q_hidden);
  take("--kv-hidden", job.options.model.kv_hidden, options.kv_hidden);
  take("--dtype", job.options.model.dtype, dtype_from_name(options.dtype));
  take("--window", job.options.mask.window, options.window);
  take("--chunk", job.options.mask.chunk, options.chunk);
  take("--prefix", job.options.mask.prefix, options.prefix);
  if (is_given("--mask")) job.options.mask.kind = mask_from_name("--mask", options.mask);
  take("--ranks-per-node", job.options.hardware.ranks_per_node, options.ranks_per_node);
  if (options.gb_per_s > 0) job.options.hardware.nvlink_bytes_per_second = options.gb_per_s * 1e9;
  check_routing_size(job.plan);
  job.options.hardware = options.facts(job.options.hardware);
  job.origin += concat(": ", plan_text(job.plan));
  return job;
}

std::string hardware_text(const StepOptions& options) {
  const HardwareFacts& facts = options.hardware;
  const LinkSpeeds known;
  const bool by_default = facts.nvlink_bytes_per_second == known.nvlink_bytes_per_second &&
                          facts.network_bytes_per_second == known.network_bytes_per_second;
  const std::string attention =
      facts.pairs_per_second > 0
          ? concat(format_si(facts.pairs_per_second), " pairs/s forward")
          : concat(format_si(options.costs.forward_flops_per_second), "FLOP/s forward, ",
                   format_si(options.costs.backward_flops_per_second), "FLOP/s backward");
  return concat("Assumed", by_default ? " (as on H200)" : "", ": attention ", attention, ";\n",
                format_si(facts.nvlink_bytes_per_second), "B/s NVLink, ",
                format_si(facts.network_bytes_per_second), "B/s network, ",
                format_plural(facts.ranks_per_node, "rank"), " per node; rows of ",
                format_bytes(options.model.q_row_bytes()), " (Q) and ",
                format_bytes(options.model.kv_row_bytes()), " (K and V)");
}

void write_trace(const Options& options, const std::vector<NamedStep>& steps, Console& console) {
  if (options.trace.empty()) return;
  write_file(options.trace, chrome_trace(steps));
  console.print(
      concat("\nTrace: ", printable_line(options.trace), " (open it at ui.perfetto.dev)\n"));
}

void write_html(const Options& options, const std::string& page, Console& console) {
  write_file(options.html, page);
  console.print(concat("\nReport: ", printable_line(options.html), " (open it in a browser)\n"));
}

void write_step_reports(const Options& options, const StepJob& job,
                        const std::vector<NamedStep>& steps, Program& program) {
  if (options.html.empty()) return write_trace(options, steps, program.console);
  const QkvRouting routing = compute_qkv_routing(job.plan);
  const ModelShape& model = job.options.model;
  ReportContext context;
  context.title = "Waybill: " + plan_text(job.plan);
  context.command = program.command_line;
  context.gb_per_s = job.options.hardware.nvlink_bytes_per_second / 1e9;
  context.inputs = {{"Plan", job.origin}, {"Hardware", hardware_text(job.options)}};
  for (const std::string& remark : job.remarks) context.inputs.push_back({"Remark", remark});
  context.steps = steps;
  const PlanSummary summary =
      summarize(job.plan, routing, {.q = model.q_row_bytes(), .kv = model.kv_row_bytes()});
  write_html(options, html_report(job.plan, routing, summary, context), program.console);
  write_trace(options, steps, program.console);
}

DispatchCheck run_checked(const QkvPlan& plan, const QkvRouting& routing, const Options& options,
                          const Console& console, std::int64_t& payload_bytes) {
  constexpr double budget_bytes = 0x1p30;
  const std::optional<std::int64_t> wanted = parse_number(options.payload_bytes);
  payload_bytes = wanted.value_or(256);  // else it is auto
  double needed = footprint(plan, routing, payload_bytes);
  while (!wanted && payload_bytes > 16 && needed > budget_bytes) {
    payload_bytes /= 2;
    needed = footprint(plan, routing, payload_bytes);
  }
  const double machine =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (needed > 0.8 * machine) {
    throw Unsupported(concat("the byte-checked run needs about ", format_si(needed),
                             "B of memory, this machine has ", format_si(machine),
                             "B; ask for fewer tokens or ranks, a smaller --payload-bytes, or "
                             "leave it out (demo --no-simulate)"));
  }
  CheckOptions check;
  check.q_row_bytes = payload_bytes;
  check.kv_row_bytes = payload_bytes;
  check.num_threads = options.num_threads;
  std::unique_ptr<Progress> progress;
  check.progress = [&](std::string_view phase, int done, int total) {
    progress.reset();
    if (done < total)
      progress =
          std::make_unique<Progress>(console, concat("[", done + 1, "/", total, "] ", phase));
  };
  return check_dispatch(plan, routing, check);
}

std::string check_text(const DispatchCheck& check) {
  const std::string done = concat(format_count(check.rows_checked), " rows, ",
                                  format_bytes(check.bytes_checked), " compared byte by byte");
  return check.passed() ? done
                        : concat(format_plural(std::ssize(check.findings), "finding"), "; ", done);
}

std::string findings_text(const std::vector<Finding>& findings, std::int64_t max_lines) {
  std::string text;
  const std::int64_t num_left = std::ssize(findings) - max_lines;
  for (std::int64_t i = 0; i < std::ssize(findings) && i < max_lines; ++i)
    text += concat(to_string(findings[i]), "\n");
  return num_left > 0 ? concat(text, "... and ", format_plural(num_left, "more finding"), "\n")
                      : text;
}

}  // namespace waybill::cli
