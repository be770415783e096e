#include "dispatch_file.h"

#include <algorithm>

#include "program.h"
#include "report/format.h"
#include "waybill/core/error.h"
#include "waybill/json/attention_plan_json.h"
#include "waybill/json/dispatch_json.h"
#include "waybill/json/metadata_json.h"
#include "waybill/json/plan_json.h"

namespace waybill::cli {
namespace {

DispatchFile dispatch_file_of(const std::string& text, const std::string& name, ReadCheck check) {
  DispatchFile file;
  file.name = name;
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

}  // namespace

DispatchFile read_dispatch_file(const std::string& path, ReadCheck check) {
  return dispatch_file_of(read_input(path), input_name(path), check);
}

DispatchFile read_plan_file(const std::string& path, ReadCheck check) {
  return plan_from_text(read_input(path), input_name(path), check);
}

DispatchFile plan_from_text(const std::string& text, const std::string& name, ReadCheck check) {
  DispatchFile file = dispatch_file_of(text, name, check);
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
  if (name == "fwd_kv") return metadata.fwd_kv;
  if (name == "rev_kv") return metadata.rev_kv;
  throw UsageError(concat("--table: got ", name, ", expected fwd_q, rev_q, fwd_kv or rev_kv"));
}

void check_routing_size(const QkvPlan& plan) {
  constexpr std::int64_t most_copies = std::int64_t{1} << 28;
  std::int64_t copies = 0;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t n = plan.doc_shard_offsets[d + 1] - plan.doc_shard_offsets[d];
    const std::int64_t holders = plan.kv_layout == KvLayout::per_query
                                     ? (n + 1) / 2
                                     : std::min<std::int64_t>(n, plan.world_size);
    copies += n * holders;  // both factors are below 2^31, and the sum is looked at every time
    if (copies > most_copies) {
      throw Unsupported(concat("the plan may need more than ", format_count(most_copies),
                               " copies of KV shards (document ", d, " has ", format_count(n),
                               " shards); use fewer shards, or --kv-layout per_rank"));
    }
  }
}

void check_dense_size(const QkvPlan& plan, const QkvRouting& routing) {
  constexpr std::int64_t most_cells = std::int64_t{1} << 27;
  std::int64_t most_shards = 0;
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    most_shards =
        std::max(most_shards, plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w]);
  }
  std::int64_t most_entries = most_shards;
  for (const SparseMetadata* table : {&routing.rev_q, &routing.rev_kv}) {
    for (std::int64_t w = 0; w < plan.world_size; ++w) {
      most_entries = std::max(most_entries, table->rank_offsets[w + 1] - table->rank_offsets[w]);
    }
  }
  std::int64_t most_copies = 1;
  for (std::int64_t entry = 0; entry < routing.fwd_kv.num_entries(); ++entry) {
    most_copies = std::max(most_copies, routing.fwd_kv.destination_end(entry) -
                                            routing.fwd_kv.destination_begin(entry));
  }
  const double world = plan.world_size;
  const double cells = world * (world + 1) + world * static_cast<double>(most_entries) +
                       world * static_cast<double>(most_shards) * static_cast<double>(most_copies);
  if (cells > static_cast<double>(most_cells)) {
    throw Unsupported(concat("the dense form needs about ", format_si(cells),
                             " entries per table, at most ",
                             format_si(static_cast<double>(most_cells)),
                             " are written as JSON; work with the plan, which is small"));
  }
}

}  // namespace waybill::cli
