#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "waybill/core/dtype.h"
#include "waybill/core/error.h"
#include "waybill/cost_model/compare_plans.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/static_plans.h"
#include "waybill/report/html_report.h"
#include "waybill/report/plan_summary.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

using RankLengths = std::vector<std::vector<std::int64_t>>;

PlannerOptions planner_options_py(std::int32_t world_size, std::int64_t tokens_per_rank,
                                  std::int64_t q_hidden, std::int64_t kv_hidden,
                                  std::string_view dtype, std::string_view mask,
                                  std::int64_t window, std::int64_t max_tokens_per_rank, bool relay,
                                  std::string_view kv_layout, std::int64_t block_tokens,
                                  std::int32_t ranks_per_node, double imbalance_target,
                                  double byte_weight, double message_seconds,
                                  double pairs_per_second, double nvlink_bytes_per_second,
                                  double network_bytes_per_second, std::int64_t row_pairs,
                                  std::int64_t shard_pairs, bool tails) {
  PlannerOptions options;
  options.world_size = world_size;
  options.tokens_per_rank = tokens_per_rank;
  options.model = {q_hidden, kv_hidden, dtype_from_name(dtype)};
  options.mask = {.window = window, .kind = mask_from_name("plan", mask)};
  options.kv_layout = kv_layout_from_name("plan", kv_layout);
  options.imbalance_target = imbalance_target;
  options.byte_weight = byte_weight;
  options.max_tokens_per_rank = max_tokens_per_rank;
  options.block_tokens = block_tokens;
  options.relay = relay;
  options.hardware = {nvlink_bytes_per_second,
                      network_bytes_per_second,
                      ranks_per_node,
                      message_seconds,
                      pairs_per_second,
                      row_pairs,
                      shard_pairs};
  options.tails = tails;
  return options;
}

void add_figures(nb::class_<AttentionPlan>& plan) {
  add_table(plan, "work", &AttentionPlan::work);
  add_table(plan, "home_tokens", &AttentionPlan::home_tokens);
  add_table(plan, "attention_tokens", &AttentionPlan::attention_tokens);
  add_table(plan, "kv_tokens", &AttentionPlan::kv_tokens);
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

/// The rows of the plan and, where receivers forward K and V, the bytes of that.
PlanSummary summary_of(const AttentionPlan& plan, const QkvRouting& routing) {
  const ModelShape& model = plan.options.model;
  PlanSummary summary =
      summarize(plan.plan, routing, {.q = model.q_row_bytes(), .kv = model.kv_row_bytes()});
  if (!plan.relay.empty())
    summary.relay_limit = limit_of(plan.bytes_in(), plan.bytes_out(TransferMode::relay));
  return summary;
}

std::string attention_summary_text(const AttentionPlan& plan, double gb_per_s) {
  return unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan.plan);
    return text_summary(plan.plan, routing, summary_of(plan, routing),
                        {.unicode = true, .gb_per_s = gb_per_s});
  });
}

std::string attention_report_page(const AttentionPlan& plan, double gb_per_s,
                                  const std::string& title) {
  return unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan.plan);
    ReportContext context{.title = title};
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

/// The options of the plan, or the usual ones, with what the caller gave in place of theirs.
template <class Plan>
StepOptions step_options_py(
    const Plan& plan, std::string_view transfer, double phase_seconds, double pull_share,
    double forward_share, double network_message_seconds, std::int64_t forward_chunk_bytes,
    double forward_flops_per_second, double backward_flops_per_second,
    std::optional<std::int64_t> q_hidden, std::optional<std::int64_t> kv_hidden,
    std::optional<std::string_view> dtype, std::optional<std::int64_t> window,
    std::optional<std::int32_t> ranks_per_node, std::optional<double> nvlink_bytes_per_second,
    std::optional<double> network_bytes_per_second, std::optional<double> message_seconds,
    std::optional<double> pairs_per_second, std::optional<std::int64_t> row_pairs,
    std::optional<std::int64_t> shard_pairs) {
  StepOptions options;
  if constexpr (std::is_same_v<Plan, AttentionPlan>) options = StepOptions::of(plan);
  const auto set = [](auto& field, const auto& given) {
    if (given) field = *given;
  };
  set(options.model.q_hidden, q_hidden);
  set(options.model.kv_hidden, kv_hidden);
  if (dtype) options.model.dtype = dtype_from_name(*dtype);
  set(options.mask.window, window);
  set(options.hardware.ranks_per_node, ranks_per_node);
  set(options.hardware.nvlink_bytes_per_second, nvlink_bytes_per_second);
  set(options.hardware.network_bytes_per_second, network_bytes_per_second);
  set(options.hardware.message_seconds, message_seconds);
  set(options.hardware.pairs_per_second, pairs_per_second);
  set(options.hardware.row_pairs, row_pairs);
  set(options.hardware.shard_pairs, shard_pairs);
  StepCosts& costs = options.costs;
  costs.phase_seconds = phase_seconds;
  costs.pull_share = pull_share;
  costs.forward_share = forward_share;
  costs.network_message_seconds = network_message_seconds;
  costs.forward_chunk_bytes = forward_chunk_bytes;
  costs.forward_flops_per_second = forward_flops_per_second;
  costs.backward_flops_per_second = backward_flops_per_second;
  if (transfer == "auto") return options;  // the plan's
  const std::optional<TransferMode> mode = transfer_from_name(transfer);
  require(mode.has_value(), "predict_step: transfer = \"", transfer,
          "\", expected \"auto\", \"direct\", \"once_per_node\" or \"relay\"");
  options.transfer = *mode;
  return options;
}

nb::object array(const std::vector<double>& values) {
  nb::object result = nb::module_::import_("numpy").attr("empty")(values.size(), "float64");
  const auto view = nb::cast<nb::ndarray<double, nb::ndim<1>, nb::c_contig>>(result);
  std::copy(values.begin(), values.end(), view.data());
  return result;
}

nb::object array(const std::vector<std::int32_t>& values) {
  return numpy_array(std::vector<std::int64_t>(values.begin(), values.end()));
}

nb::tuple cause_tuple(const StepCause& cause) {
  return nb::make_tuple(std::string(to_string(cause.phase)), cause.rank,
                        std::string(to_string(cause.resource)), cause.seconds, cause.amount,
                        cause.document, cause.document_amount);
}

nb::object link_array(const PhasePrediction& phase, std::int32_t world_size,
                      std::int64_t LinkBytes::*side) {
  std::vector<std::int64_t> bytes(world_size, 0);
  for (std::size_t r = 0; r < phase.links.size(); ++r) bytes[r] = phase.links[r].*side;
  return numpy_array(std::move(bytes));
}

nb::list phase_tuples(const StepPrediction& step) {
  nb::list phases;
  for (const PhasePrediction& phase : step.phases) {
    phases.append(nb::make_tuple(std::string(to_string(phase.phase)), array(phase.begin),
                                 array(phase.end), array(phase.seconds), array(phase.waits_for),
                                 link_array(phase, step.world_size, &LinkBytes::nvlink_in),
                                 link_array(phase, step.world_size, &LinkBytes::nvlink_out),
                                 link_array(phase, step.world_size, &LinkBytes::network_in),
                                 link_array(phase, step.world_size, &LinkBytes::network_out),
                                 cause_tuple(phase.slowest)));
  }
  return phases;
}

nb::list cause_tuples(const std::vector<StepCause>& causes) {
  nb::list tuples;
  for (const StepCause& cause : causes) tuples.append(cause_tuple(cause));
  return tuples;
}

template <class Plan>
std::vector<Remedy> remedies_of(const Plan& plan, const StepPrediction& step) {
  return unlocked([&] { return step_remedies(StepPredictor(plan), step); });
}

/// Functions that need the plan again; `Plan` is a QkvPlan or an AttentionPlan.
template <class Plan>
void bind_of_plan(nb::module_& m) {
  m.def("step_options", step_options_py<Plan>, "plan"_a, "transfer"_a, "phase_seconds"_a,
        "pull_share"_a, "forward_share"_a, "network_message_seconds"_a, "forward_chunk_bytes"_a,
        "forward_flops_per_second"_a, "backward_flops_per_second"_a, "q_hidden"_a = nb::none(),
        "kv_hidden"_a = nb::none(), "dtype"_a = nb::none(), "window"_a = nb::none(),
        "ranks_per_node"_a = nb::none(), "nvlink_bytes_per_second"_a = nb::none(),
        "network_bytes_per_second"_a = nb::none(), "message_seconds"_a = nb::none(),
        "pairs_per_second"_a = nb::none(), "row_pairs"_a = nb::none(),
        "shard_pairs"_a = nb::none());
  m.def(
      "predict_step",
      [](const Plan& plan, const StepOptions& options) {
        return unlocked([&] { return predict_step(plan, options); });
      },
      "plan"_a, "options"_a);
  m.def("step_remedies", [](const Plan& plan, const StepPrediction& step) {
    nb::list tuples;
    for (const Remedy& remedy : remedies_of(plan, step))
      tuples.append(nb::make_tuple(std::string(to_string(remedy.kind)), remedy.seconds));
    return tuples;
  });
  m.def("explain_step", [](const Plan& plan, const StepPrediction& step) {
    return explain_step(step, remedies_of(plan, step));
  });
}

void bind_prediction(nb::module_& m) {
  nb::class_<StepOptions>(m, "StepOptions");
  nb::class_<StepPrediction> step(m, "StepPrediction");
  step.def_ro("world_size", &StepPrediction::world_size);
  step.def_ro("seconds", &StepPrediction::seconds);
  step.def_ro("forward_seconds", &StepPrediction::forward_seconds);
  add_table(step, "work", &StepPrediction::work);
  step.def_prop_ro("transfer", [](const StepPrediction& s) {
    return std::string(to_string(s.options.transfer));
  });
  step.def("phases", &phase_tuples);
  step.def("path", [](const StepPrediction& s) { return cause_tuples(s.path); });
  step.def("bottleneck", [](const StepPrediction& s) { return cause_tuple(s.bottleneck()); });
  step.def("phase_table", [](const StepPrediction& s) { return phase_table(s); });
  step.def("rank_table", [](const StepPrediction& s, std::int32_t r) { return rank_table(s, r); });
  step.def(nb::self == nb::self);
}

void bind_named(nb::module_& m) {
  nb::class_<NamedStep> named(m, "NamedStep");
  named.def_static("make", [](std::string name, std::int64_t shards, const StepPrediction& step) {
    return NamedStep{std::move(name), shards, step};
  });
  named.def_ro("name", &NamedStep::name);
  named.def_ro("num_shards", &NamedStep::num_shards);
  named.def_ro("step", &NamedStep::step);
  m.def("step_table", [](const std::vector<NamedStep>& steps) { return step_table(steps); });
  m.def("chrome_trace", [](const std::vector<NamedStep>& steps) {
    return unlocked([&] { return chrome_trace(steps); });
  });
  m.def(
      "compare_plans",
      [](const std::vector<std::int64_t>& lengths, const PlannerOptions& planner,
         std::int32_t degree) {
        const CompareOptions options{.planner = planner, .degree = degree};
        return unlocked([&] { return compare_plans(lengths, options); });
      },
      "doc_lengths"_a, "planner"_a, "degree"_a);
}

void bind_cost_model(nb::module_& m) {
  bind_prediction(m);
  bind_named(m);
  bind_of_plan<QkvPlan>(m);
  bind_of_plan<AttentionPlan>(m);
  const auto bind_static = [&](const char* name, auto* make) {
    m.def(name,
          [name, make](const std::vector<std::int64_t>& lengths, std::int32_t world_size,
                       std::int64_t tokens_per_rank, std::int32_t degree, std::string_view mask) {
            const StaticPlanOptions options{world_size, tokens_per_rank, degree,
                                            mask_from_name(name, mask)};
            return unlocked([&] { return make(lengths, options); });
          });
  };
  bind_static("zigzag_plan", &zigzag_plan);
  bind_static("per_document_plan", &per_document_plan);
  m.def("static_degree", &StaticPlanOptions::degree_of);
}

}  // namespace

void bind_planner(nb::module_& m) {
  nb::class_<PlannerOptions>(m, "PlannerOptions");
  m.def("planner_options", planner_options_py, "world_size"_a, "tokens_per_rank"_a, "q_hidden"_a,
        "kv_hidden"_a, "dtype"_a, "mask"_a, "window"_a, "max_tokens_per_rank"_a, "relay"_a,
        "kv_layout"_a, "block_tokens"_a, "ranks_per_node"_a, "imbalance_target"_a, "byte_weight"_a,
        "message_seconds"_a, "pairs_per_second"_a, "nvlink_bytes_per_second"_a,
        "network_bytes_per_second"_a, "row_pairs"_a, "shard_pairs"_a, "tails"_a);
  nb::class_<AttentionPlan> plan(m, "AttentionPlan");
  add_figures(plan);
  plan.def_ro("plan", &AttentionPlan::plan);
  plan.def("hops", &hop_tuples);
  plan.def("text", [](const AttentionPlan& p) { return to_string(p); });
  plan.def("summary_text", &attention_summary_text, "gb_per_s"_a);
  plan.def("report_page", &attention_report_page, "gb_per_s"_a, "title"_a);
  plan.def(nb::self == nb::self);
  plan.def("to_json", [](const AttentionPlan& p, bool compact) {
    return unlocked([&] { return to_json(p, compact ? JsonStyle::compact : JsonStyle::readable); });
  });
  plan.def("validate", [](const AttentionPlan& p, std::int64_t max_findings) {
    return finding_tuples(unlocked([&] { return validate(p, {.max_findings = max_findings}); }));
  });
  const auto bind_plan_of = [&]<class Lengths>(const char* argument, const Lengths& /*lengths*/) {
    m.def(
        "plan_attention",
        [](const Lengths& lengths, const PlannerOptions& options) {
          return unlocked([&] { return plan_attention(lengths, options); });
        },
        nb::arg(argument), "options"_a);
  };
  bind_plan_of("doc_lengths", std::vector<std::int64_t>{});
  bind_plan_of("rank_doc_lengths", RankLengths{});
  m.def(
      "check_planner_options",
      [](const PlannerOptions& options, const std::string& who) { options.check(who.c_str()); },
      "options"_a, "who"_a);
  m.def(
      "plan_pieces",
      [](const std::vector<std::int64_t>& counts, const std::vector<std::int64_t>& pieces,
         const PlannerOptions& options) {
        return unlocked([&] { return plan_pieces(rank_pieces_from(counts, pieces), options); });
      },
      "counts"_a, "pieces"_a, "options"_a);
  m.def(
      "attention_plan_from_json",
      [](std::string_view text, std::string_view origin) {
        return unlocked([&] { return attention_plan_from_json(text, origin); });
      },
      "text"_a, "origin"_a);
  bind_cost_model(m);
}

}  // namespace waybill::python
