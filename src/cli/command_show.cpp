#include <algorithm>
#include <memory>

#include "commands.h"
#include "dispatch_file.h"
#include "options.h"
#include "report/format.h"
#include "waybill/report/text_summary.h"

namespace waybill::cli {
namespace {

struct ShowOptions {
  std::string input;
  std::int32_t rank = -1;
  std::string table;
  RowOptions rows;
};

std::string pad(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
}

// Where each shard stands in its document.
struct Place {
  std::int64_t document = 0;
  std::int64_t position = 0;
  std::int64_t first_token = 0;
};

std::vector<Place> places(const QkvPlan& plan) {
  std::vector<Place> result(plan.num_shards());
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t begin = plan.doc_shard_offsets[d];
    std::int64_t token = 0;
    for (std::int64_t i = begin; i < plan.doc_shard_offsets[d + 1]; ++i) {
      const std::int32_t shard = plan.doc_shards[i];
      result[shard] = {d, i - begin, token};
      token += plan.shard_len[shard];
    }
  }
  return result;
}

std::string shard_lines(const QkvPlan& plan, std::int32_t rank) {
  const std::vector<Place> place = places(plan);
  std::int64_t row = 0;
  std::string text = concat("Shards of rank ", rank,
                            "\n   shard  first row     tokens  document  place  first token  keys "
                            "from place  attended by\n");
  const std::int64_t end = plan.rank_shard_offsets[rank + 1];
  for (std::int64_t n = plan.rank_shard_offsets[rank]; n < end; ++n) {
    const Place& p = place[n];
    text += concat(pad(std::to_string(n), 8), pad(format_count(row), 11),
                   pad(format_count(plan.shard_len[n]), 11), pad(std::to_string(p.document), 10),
                   pad(std::to_string(p.position), 7), pad(format_count(p.first_token), 13),
                   pad(std::to_string(plan.kv_begin.empty() ? 0 : plan.kv_begin[n]), 17),
                   pad(std::to_string(plan.q_dst[n]), 13), "\n");
    row += plan.shard_len[n];
  }
  return text + concat("It attends to the queries of ",
                       std::count(plan.q_dst.begin(), plan.q_dst.end(), rank), " shards.\n");
}

std::string table_line(const char* name, const Metadata& metadata) {
  std::int64_t rows = 0;
  for (const std::int64_t total : metadata.num_total_recv_tokens) {
    require(!__builtin_add_overflow(rows, total, &rows), "show: ", name,
            ": the sum of num_total_recv_tokens exceeds 2^63 - 1");
  }
  return concat("  ", name, std::string(8 - std::string_view(name).size(), ' '), "dst_rank ",
                to_string(metadata.dst_rank.shape()), ", ", format_count(rows), " rows arrive\n");
}

void check_rank(const ShowOptions& options, std::int64_t world_size) {
  require(options.rank < world_size, "--rank = ", options.rank, ", expected 0..", world_size - 1);
}

std::string metadata_text(const ShowOptions& options, const Metadata& metadata) {
  if (options.rank < 0) return to_string(metadata) + "\n";
  return to_string(metadata.get_slice(Rank{options.rank})) + "\n";
}

std::string show_bundle(const ShowOptions& options, E2eMetadata& bundle) {
  if (!options.table.empty()) return metadata_text(options, table_of(bundle, options.table));
  std::string text = "\nMetadata\n";
  for (const char* name : {"fwd_q", "rev_q", "fwd_kv", "rev_kv"}) {
    const Metadata& table = table_of(bundle, name);
    text += options.rank < 0 ? table_line(name, table)
                             : concat("\n", name, "\n", metadata_text(options, table));
  }
  return text;
}

std::string show_plan(const ShowOptions& options, const QkvPlan& plan, const Console& console) {
  if (options.rank >= 0) {
    check_rank(options, plan.world_size);
    return shard_lines(plan, options.rank);
  }
  check_routing_size(plan);
  const QkvRouting routing = compute_qkv_routing(plan);
  TextStyle style = console.style();
  style.gb_per_s = options.rows.gb_per_s;
  return text_summary(plan, routing, summarize(plan, routing, options.rows.row_bytes()), style);
}

int run_show(const ShowOptions& options, Program& program) {
  DispatchFile file = read_dispatch_file(options.input, ReadCheck::values);
  std::string text;
  if (file.metadata) {
    text = metadata_text(options, *file.metadata);
  } else {
    if (!options.table.empty() && !file.bundle) {
      check_routing_size(*file.plan);
      const QkvRouting routing = compute_qkv_routing(*file.plan);
      check_dense_size(*file.plan, routing);
      file.bundle = to_dense(routing);
    }
    if (options.table.empty()) text = show_plan(options, *file.plan, program.console);
    if (file.bundle) text += show_bundle(options, *file.bundle);
  }
  program.console.print(text);
  return exit_good;
}

}  // namespace

void add_show_command(Command app, Program& program) {
  auto options = std::make_shared<ShowOptions>();
  Command command =
      app.add_command("show", "Prints a plan, a dispatch or metadata in readable form");
  command.option("FILE", options->input, "Plan, dispatch or metadata JSON; - is standard input")
      .required()
      .value_name("");
  command.option("--rank", options->rank, "Only this rank: its shards and slices")
      .value_name("N")
      .not_negative();
  command.option("--table", options->table, "Only this table")
      .value_name("NAME")
      .one_of({"fwd_q", "rev_q", "fwd_kv", "rev_kv"});
  add_row_options(command, options->rows);
  command.footer(
      "Examples:\n"
      "  waybill show plan.json --gb-per-s 400\n"
      "  waybill show plan.json --rank 3\n"
      "  waybill show dispatch.json --table rev_kv --rank 0");
  command.when_chosen([options, &program] {
    program.run = [options, &program] { return run_show(*options, program); };
  });
}

}  // namespace waybill::cli
