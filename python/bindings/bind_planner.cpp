#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "planner_options.h"
#include "waybill/core/dtype.h"
#include "waybill/core/error.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/plan_pieces.h"
#include "waybill/planner/planner.h"
#include "waybill/report/html_report.h"
#include "waybill/report/plan_summary.h"

namespace waybill::python {

using namespace nb::literals;

PlannerOptions planner_options_from(const nb::dict& given) {
  const auto integer = [&](const char* name) { return nb::cast<std::int64_t>(given[name]); };
  const auto number = [&](const char* name) { return nb::cast<double>(given[name]); };
  PlannerOptions options;
  const auto integer32 = [&](const char* name) {
    const std::int64_t value = integer(name);
    require(std::in_range<std::int32_t>(value), name, " = ", value, ", expected at most 2^31 - 1");
    return static_cast<std::int32_t>(value);
  };
  options.world_size = integer32("world_size");
  options.tokens_per_rank = integer("tokens_per_rank");
  options.model = {integer("q_hidden"), integer("kv_hidden"),
                   dtype_from_name(nb::cast<std::string>(given["dtype"]))};
  options.mask = {.window = integer("window"),
                  .kind = mask_from_name("plan", nb::cast<std::string>(given["mask"]))};
  options.kv_layout = kv_layout_from_name("plan", nb::cast<std::string>(given["kv_layout"]));
  options.imbalance_target = number("imbalance_target");
  options.byte_weight = number("byte_weight");
  options.max_tokens_per_rank = integer("max_tokens_per_rank");
  options.block_tokens = integer("block_tokens");
  options.relay = nb::cast<bool>(given["relay"]);
  options.hardware = {number("nvlink_bytes_per_second"),
                      number("network_bytes_per_second"),
                      integer32("ranks_per_node"),
                      number("message_seconds"),
                      number("pairs_per_second"),
                      integer("row_pairs"),
                      integer("shard_pairs")};
  options.tails = nb::cast<bool>(given["tails"]);
  return options;
}

namespace {

using RankLengths = std::vector<std::vector<std::int64_t>>;

void add_figures(nb::class_<AttentionPlan>& plan) {
  const auto add = [&](const char* name, std::vector<std::int64_t> AttentionPlan::*figures) {
    plan.def_prop_ro(name, [figures](nb::handle self) {
      return numpy_view(nb::cast<const AttentionPlan&>(self).*figures, self);
    });
  };
  add("work", &AttentionPlan::work);
  add("home_tokens", &AttentionPlan::home_tokens);
  add("attention_tokens", &AttentionPlan::attention_tokens);
  add("kv_tokens", &AttentionPlan::kv_tokens);
  plan.def_ro("block_work", &AttentionPlan::block_work);
  plan.def_ro("least_bytes_in", &AttentionPlan::least_bytes_in);
  plan.def_prop_ro("has_relay", [](const AttentionPlan& p) { return !p.relay.empty(); });
  plan.def("bytes_in", [](const AttentionPlan& p) { return numpy_array(p.bytes_in()); });
  plan.def(
      "bytes_out",
      [](const AttentionPlan& p, bool relay) {
        return numpy_array(p.bytes_out(relay ? TransferMode::relay : TransferMode::direct));
      },
      "relay"_a);
  plan.def(
      "limit_seconds",
      [](const AttentionPlan& p, bool relay) {
        return p.limit_seconds(relay ? TransferMode::relay : TransferMode::direct);
      },
      "relay"_a);
  plan.def("imbalance", &AttentionPlan::imbalance);
  plan.def("balanced", &AttentionPlan::balanced);
}

nb::list hop_tuples(const AttentionPlan& plan) {
  nb::list hops;
  for (const RelayHop& hop : plan.relay.hops) {
    hops.append(nb::make_tuple(hop.src_rank, hop.dst_rank, hop.shard, hop.stage, hop.row_begin,
                               hop.num_rows, hop.after));
  }
  return hops;
}

// The plan's own rows and, where receivers forward K and V, the bytes of that.
PlanSummary summary_of(const AttentionPlan& plan, const QkvRouting& routing) {
  const ModelShape& model = plan.options.model;
  PlanSummary summary =
      summarize(plan.plan, routing, {.q = model.q_row_bytes(), .kv = model.kv_row_bytes()});
  if (!plan.relay.empty())
    summary.relay_limit = limit_of(plan.bytes_in(), plan.bytes_out(TransferMode::relay));
  return summary;
}

std::string summary_text(const AttentionPlan& plan, double gb_per_s) {
  return unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan.plan);
    return text_summary(plan.plan, routing, summary_of(plan, routing),
                        {.unicode = true, .gb_per_s = gb_per_s});
  });
}

std::string report_page(const AttentionPlan& plan, double gb_per_s, const std::string& title) {
  return unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan.plan);
    ReportContext context;
    context.title = title;
    context.gb_per_s = gb_per_s;
    return html_report(plan.plan, routing, summary_of(plan, routing), context);
  });
}

/// @param counts [W]: pieces of each rank
/// @param pieces (document, offset, length) of one piece after another
std::vector<std::vector<DocumentRange>> rank_pieces_from(const std::vector<std::int64_t>& counts,
                                                         const std::vector<std::int64_t>& pieces) {
  std::vector<std::vector<DocumentRange>> ranks(counts.size());
  auto next = pieces.begin();
  for (std::size_t r = 0; r < counts.size(); ++r) {
    for (std::int64_t i = 0; i < counts[r]; ++i, next += 3) {
      require(pieces.end() - next >= 3, "plan_pieces: ", pieces.size() / 3,
              " pieces, expected as many as the ranks hold");
      ranks[r].push_back({.document = next[0], .offset = next[1], .length = next[2]});
    }
  }
  return ranks;
}

}  // namespace

void bind_planner(nb::module_& m) {
  nb::class_<AttentionPlan> plan(m, "AttentionPlan");
  add_figures(plan);
  plan.def_ro("plan", &AttentionPlan::plan);
  plan.def("hops", &hop_tuples);
  plan.def("text", [](const AttentionPlan& p) { return to_string(p); });
  plan.def("summary_text", &summary_text, "gb_per_s"_a);
  plan.def("report_page", &report_page, "gb_per_s"_a, "title"_a);
  plan.def(
      "__eq__", [](const AttentionPlan& a, const AttentionPlan& b) { return a == b; },
      nb::is_operator());
  plan.def("to_json", [](const AttentionPlan& p, bool compact) {
    return unlocked([&] { return to_json(p, compact ? JsonStyle::compact : JsonStyle::readable); });
  });
  plan.def("validate", [](const AttentionPlan& p, std::int64_t max_findings) {
    ValidateOptions options;
    options.max_findings = max_findings;
    return finding_tuples(unlocked([&] { return validate(p, options); }));
  });
  m.def(
      "plan_flat",
      [](const std::vector<std::int64_t>& lengths, const nb::dict& options) {
        const PlannerOptions given = planner_options_from(options);
        return unlocked([&] { return plan_attention(lengths, given); });
      },
      "doc_lengths"_a, "options"_a);
  m.def(
      "plan_ranks",
      [](const RankLengths& lengths, const nb::dict& options) {
        const PlannerOptions given = planner_options_from(options);
        return unlocked([&] { return plan_attention(lengths, given); });
      },
      "rank_doc_lengths"_a, "options"_a);
  m.def(
      "check_planner_options",
      [](const nb::dict& options, const std::string& who) {
        planner_options_from(options).check(who.c_str());
      },
      "options"_a, "who"_a);
  m.def(
      "plan_pieces",
      [](const std::vector<std::int64_t>& counts, const std::vector<std::int64_t>& pieces,
         const nb::dict& options) {
        const PlannerOptions given = planner_options_from(options);
        return unlocked([&] { return plan_pieces(rank_pieces_from(counts, pieces), given); });
      },
      "counts"_a, "pieces"_a, "options"_a);
  m.def("attention_plan_from_json", [](std::string_view text, std::string_view origin) {
    return unlocked([&] { return attention_plan_from_json(text, origin); });
  });
}

}  // namespace waybill::python
