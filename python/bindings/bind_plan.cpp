#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_casters.h"
#include "waybill/core/dtype.h"
#include "waybill/core/error.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/static_plans.h"
#include "waybill/planner/varlen_relay.h"
#include "waybill/report/html_report.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

/// [W, W] wire rows of Q and of KV from the sparse counts, receiving rank first.
nb::tuple traffic(const QkvPlan& plan) {
  const auto dense = [&](const SparseMetadata& table) {
    const std::int64_t world = table.world_size;
    IndexArray rows({world, world});
    for (std::int64_t r = 0; r < world; ++r) {
      for (auto i = table.recv.offsets[r]; i < table.recv.offsets[r + 1]; ++i)
        rows.i64()[r * world + table.recv.src_rank[i]] = table.recv.tokens[i];
    }
    return rows;
  };
  auto [q, kv] = unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan);
    return std::pair(dense(routing.fwd_q), dense(routing.fwd_kv));
  });
  return nb::make_tuple(numpy_array(std::move(q)), numpy_array(std::move(kv)));
}

/// @param relay_limit where receivers forward K and V
std::string summary_text(const QkvPlan& plan, const RowBytes& row_bytes, const TextStyle& style,
                         const std::optional<RankLimit>& relay_limit = std::nullopt) {
  const QkvRouting routing = compute_qkv_routing(plan);
  PlanSummary summary = summarize(plan, routing, row_bytes);
  summary.relay_limit = relay_limit;
  return text_summary(plan, routing, summary, style);
}

std::string report_page(const QkvPlan& plan, const RowBytes& row_bytes, double gb_per_s,
                        const std::string& title,
                        const std::optional<RankLimit>& relay_limit = std::nullopt) {
  const QkvRouting routing = compute_qkv_routing(plan);
  PlanSummary summary = summarize(plan, routing, row_bytes);
  summary.relay_limit = relay_limit;
  ReportContext context{.title = title};
  context.gb_per_s = gb_per_s;
  return html_report(plan, routing, summary, context);
}

QkvPlan make_plan(std::int32_t world_size, std::vector<std::int64_t> rank_shard_offsets,
                  std::vector<std::int64_t> shard_len, std::vector<std::int32_t> q_dst,
                  std::vector<std::int64_t> doc_shard_offsets, std::vector<std::int32_t> doc_shards,
                  std::vector<std::int32_t> kv_begin, std::vector<std::int32_t> kv_end,
                  std::string_view kv_layout, std::string_view mask) {
  QkvPlan plan{world_size,
               kv_layout_from_name("QkvPlan", kv_layout),
               std::move(rank_shard_offsets),
               std::move(shard_len),
               std::move(q_dst),
               std::move(doc_shard_offsets),
               std::move(doc_shards),
               std::move(kv_begin),
               std::move(kv_end)};
  const bool full = mask == to_string(MaskKind::full);
  require(full || mask == to_string(MaskKind::causal), "QkvPlan: mask = \"", mask,
          "\", expected \"causal\" or \"full\"");
  require(!full || plan.kv_begin.empty(), "QkvPlan: kv_begin has ", plan.kv_begin.size(),
          " values, expected none: the mask is full");
  require(!full || plan.kv_end.empty(), "QkvPlan: kv_end has ", plan.kv_end.size(),
          " values, expected none: the mask is full");
  if (full) plan.need_whole_documents();
  plan.check("QkvPlan");
  return plan;
}

void bind_sparse_metadata(nb::module_& m) {
  nb::class_<SparseMetadata> sparse(m, "SparseMetadata");
  sparse.def_ro("world_size", &SparseMetadata::world_size);
  add_table(sparse, "rank_offsets", &SparseMetadata::rank_offsets);
  add_table(sparse, "seq_len", &SparseMetadata::seq_len);
  add_table(sparse, "copy_offsets", &SparseMetadata::copy_offsets);
  add_table(sparse, "dst_rank", &SparseMetadata::dst_rank);
  add_table(sparse, "dst_offset", &SparseMetadata::dst_offset);
  sparse.def_prop_ro("recv_total", [](nb::handle self) {
    return numpy_view(nb::cast<const SparseMetadata&>(self).recv.total, self);
  });
  sparse.def(nb::self == nb::self);
  m.def(
      "to_sparse", [](const Metadata& metadata) { return to_sparse(metadata); }, pure_call);
  m.def("to_dense", [](const SparseMetadata& metadata) { return to_dense(metadata); });
  m.def("to_dense_reverse", to_dense_reverse);
}

/// The lines of one rank: (shard, q_begin, q_len, kv_row, kv_len), read-only views.
nb::tuple attention_of(nb::handle self, std::int32_t rank) {
  const SparseAttnLayout& layout = nb::cast<const QkvRouting&>(self).attention;
  const std::int64_t world = std::ssize(layout.rank_offsets) - 1;
  require(0 <= rank && rank < world, "QkvRouting.attention: rank = ", rank, ", expected 0..",
          world - 1);
  const std::int64_t first = layout.rank_offsets[rank];
  const std::int64_t count = layout.rank_offsets[rank + 1] - first;
  const auto lines = [&](const auto& table) {
    return numpy_view(std::span(table.data(), table.size()).subspan(first, count), self);
  };
  return nb::make_tuple(lines(layout.shard), lines(layout.q_begin), lines(layout.q_len),
                        lines(layout.kv_row), lines(layout.kv_len));
}

/// Ranges as a list of numbers, one after another.
std::vector<std::int64_t> flat(const std::vector<VarlenSequence>& sequences) {
  std::vector<std::int64_t> values;
  for (const VarlenSequence& s : sequences)
    values.insert(values.end(), {s.q_begin, s.q_len, s.kv_begin, s.kv_len, s.is_whole ? 1 : 0});
  return values;
}

std::vector<std::int64_t> flat(const std::vector<RowRange>& ranges) {
  std::vector<std::int64_t> values;
  for (const RowRange& r : ranges) values.insert(values.end(), {r.begin, r.rows});
  return values;
}

/// (in_place, dispatched, q_rows, kv_rows) of one rank.
nb::tuple varlen_rank(const VarlenRouting& routing, std::int32_t rank) {
  const std::int64_t world = std::ssize(routing.ranks);
  require(0 <= rank && rank < world, "VarlenRouting.rank: rank = ", rank, ", expected 0..",
          world - 1);
  const VarlenRank& r = routing.ranks[rank];
  return nb::make_tuple(numpy_array(flat(r.in_place)), numpy_array(flat(r.dispatched)),
                        numpy_array(flat(r.q_rows)), numpy_array(flat(r.kv_rows)));
}

void bind_varlen(nb::module_& m) {
  nb::class_<VarlenRouting> routing(m, "VarlenRouting");
  routing.def_ro("fwd_q", &VarlenRouting::fwd_q);
  routing.def_ro("rev_q", &VarlenRouting::rev_q);
  routing.def_ro("fwd_kv", &VarlenRouting::fwd_kv);
  routing.def_ro("sum_kv", &VarlenRouting::sum_kv);
  routing.def("rank", &varlen_rank);
  routing.def("in_place_share", &in_place_share);
  m.def("compute_varlen_routing", compute_varlen_routing, "plan"_a, "in_place"_a, pure_call);
}

void bind_sparse(nb::module_& m) {
  bind_sparse_metadata(m);
  nb::class_<QkvRouting> routing(m, "Routing");
  routing.def_prop_ro("per_query",
                      [](const QkvRouting& r) { return r.kv_layout == KvLayout::per_query; });
  routing.def_ro("fwd_q", &QkvRouting::fwd_q);
  routing.def_ro("rev_q", &QkvRouting::rev_q);
  routing.def_ro("fwd_kv", &QkvRouting::fwd_kv);
  routing.def_ro("rev_kv", &QkvRouting::rev_kv);
  routing.def("attention_of", &attention_of);
  m.def("compute_qkv_routing", compute_qkv_routing, "plan"_a, "num_threads"_a, pure_call);
  bind_varlen(m);
}

PlannerOptions planner_options_py(
    std::int32_t world_size, std::int64_t tokens_per_rank, std::int64_t q_hidden,
    std::int64_t kv_hidden, std::string_view dtype, std::string_view mask, std::int64_t window,
    std::int64_t chunk, std::int64_t prefix, std::vector<std::int64_t> prefixes,
    std::int64_t max_tokens_per_rank, bool relay, std::string_view kv_layout,
    std::int64_t block_tokens, std::int32_t ranks_per_node, double imbalance_target,
    double byte_weight, double message_seconds, double pairs_per_second,
    double nvlink_bytes_per_second, double network_bytes_per_second, std::int64_t row_pairs,
    std::int64_t shard_pairs, bool tails) {
  PlannerOptions options;
  options.world_size = world_size;
  options.tokens_per_rank = tokens_per_rank;
  options.model = {q_hidden, kv_hidden, dtype_from_name(dtype)};
  options.mask = {
      .window = window, .kind = mask_from_name("plan", mask), .chunk = chunk, .prefix = prefix};
  options.prefixes = std::move(prefixes);
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
  plan.def_ro("relay", &AttentionPlan::relay);
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

nb::list hop_tuples(const RelaySchedule& relay) {
  nb::list hops;
  for (const RelayHop& hop : relay.hops) {
    hops.append(nb::make_tuple(hop.src_rank, hop.dst_rank, hop.shard, hop.stage, hop.row_begin,
                               hop.num_rows, hop.after));
  }
  return hops;
}

RowBytes row_bytes_of(const AttentionPlan& plan) {
  const ModelShape& model = plan.options.model;
  return {.q = model.q_row_bytes(), .kv = model.kv_row_bytes()};
}

std::optional<RankLimit> relay_limit_of(const AttentionPlan& plan) {
  if (plan.relay.empty()) return std::nullopt;
  return limit_of(plan.bytes_in(), plan.bytes_out(TransferMode::relay));
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

/// A batch as ContextParallelAttention moves it. Python keeps plan and routing.
struct BatchTables {
  /// @param use "auto", "always" or "never"
  /// @param given a schedule of the plan's K and V, which is taken unless use is "never"; or null
  BatchTables(const QkvPlan& its_plan, const VarlenRouting& its_routing,
              const PlannerOptions& its_options, std::string_view use, const RelaySchedule* given)
      : plan(its_plan), routing(its_routing), options(its_options) {
    if (given != nullptr) {
      if (use != "never") relay = *given;
    } else if (use == "auto") {
      relay = relay_that_pays(plan, routing, options);
    } else if (use == "always") {
      relay = plan_varlen_relay(plan, routing, options, VarlenRelayUse::always);
    }
    if (!relay.empty()) sums = relay_of_sums(routing, relay);
  }

  const QkvPlan& plan;
  const VarlenRouting& routing;
  PlannerOptions options;
  RelaySchedule relay;  ///< forwards K and V
  RelaySchedule sums;   ///< adds up their gradients
};

template <class Plan>
StepPredictor predictor_of(const Plan& plan) {
  if constexpr (std::is_same_v<Plan, BatchTables>) {
    return StepPredictor(plan.plan, plan.routing, &plan.relay);
  } else {
    return StepPredictor(plan);
  }
}

template <class Plan>
StepOptions usual_options(const Plan& plan) {
  if constexpr (std::is_same_v<Plan, AttentionPlan>) return StepOptions::of(plan);
  if constexpr (std::is_same_v<Plan, BatchTables>)
    return {.model = plan.options.model,
            .mask = plan.options.mask,
            .hardware = plan.options.hardware,
            .transfer = plan.relay.empty() ? TransferMode::direct : TransferMode::relay};
  return {};
}

/// The options of the plan, or the usual ones, with what the caller gave in place of theirs.
template <class Plan>
StepOptions step_options_py(
    const Plan& plan, std::string_view transfer, double phase_seconds, double pull_share,
    double forward_share, double network_message_seconds, std::int64_t forward_chunk_bytes,
    double forward_flops_per_second, double backward_flops_per_second,
    std::optional<std::int64_t> q_hidden, std::optional<std::int64_t> kv_hidden,
    std::optional<std::string_view> dtype, std::optional<std::int64_t> window,
    std::optional<std::int64_t> chunk, std::optional<std::int32_t> ranks_per_node,
    std::optional<double> nvlink_bytes_per_second, std::optional<double> network_bytes_per_second,
    std::optional<double> message_seconds, std::optional<double> pairs_per_second,
    std::optional<std::int64_t> row_pairs, std::optional<std::int64_t> shard_pairs) {
  StepOptions options = usual_options(plan);
  const auto set = [](auto& field, const auto& given) {
    if (given) field = *given;
  };
  set(options.model.q_hidden, q_hidden);
  set(options.model.kv_hidden, kv_hidden);
  if (dtype) options.model.dtype = dtype_from_name(*dtype);
  set(options.mask.window, window);
  set(options.mask.chunk, chunk);
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
  return nb::make_tuple(to_string(cause.phase), cause.rank, to_string(cause.resource),
                        cause.seconds, cause.amount, cause.document, cause.document_amount);
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
    phases.append(nb::make_tuple(
        to_string(phase.phase), array(phase.begin), array(phase.end), array(phase.seconds),
        array(phase.waits_for), link_array(phase, step.world_size, &LinkBytes::nvlink_in),
        link_array(phase, step.world_size, &LinkBytes::nvlink_out),
        link_array(phase, step.world_size, &LinkBytes::network_in),
        link_array(phase, step.world_size, &LinkBytes::network_out), cause_tuple(phase.slowest)));
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
  return unlocked([&] { return step_remedies(predictor_of(plan), step); });
}

/// Functions that need the plan again; `Plan` is a QkvPlan, an AttentionPlan or BatchTables.
template <class Plan>
void bind_of_plan(nb::module_& m) {
  m.def("step_options", step_options_py<Plan>, "plan"_a, "transfer"_a, "phase_seconds"_a,
        "pull_share"_a, "forward_share"_a, "network_message_seconds"_a, "forward_chunk_bytes"_a,
        "forward_flops_per_second"_a, "backward_flops_per_second"_a, "q_hidden"_a = nb::none(),
        "kv_hidden"_a = nb::none(), "dtype"_a = nb::none(), "window"_a = nb::none(),
        "chunk"_a = nb::none(), "ranks_per_node"_a = nb::none(),
        "nvlink_bytes_per_second"_a = nb::none(), "network_bytes_per_second"_a = nb::none(),
        "message_seconds"_a = nb::none(), "pairs_per_second"_a = nb::none(),
        "row_pairs"_a = nb::none(), "shard_pairs"_a = nb::none());
  m.def(
      "predict_step",
      [](const Plan& plan, const StepOptions& options) {
        return predictor_of(plan).predict(options);
      },
      "plan"_a, "options"_a, pure_call);
  m.def("step_remedies", [](const Plan& plan, const StepPrediction& step) {
    nb::list tuples;
    for (const Remedy& remedy : remedies_of(plan, step))
      tuples.append(nb::make_tuple(to_string(remedy.kind), remedy.seconds));
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
  step.def_prop_ro("transfer",
                   [](const StepPrediction& s) { return to_string(s.options.transfer); });
  step.def("phases", &phase_tuples);
  step.def("path", [](const StepPrediction& s) { return cause_tuples(s.path); });
  step.def("bottleneck", [](const StepPrediction& s) { return cause_tuple(s.bottleneck()); });
  step.def("phase_table", phase_table);
  step.def("rank_table", rank_table);
  step.def(nb::self == nb::self);
}

void bind_named(nb::module_& m) {
  nb::class_<NamedStep> named(m, "NamedStep");
  named.def_static("make", [](std::string name, std::int64_t shards, const StepPrediction& step,
                              std::int32_t degree) {
    return NamedStep{std::move(name), shards, step, degree};
  });
  named.def_ro("name", &NamedStep::name);
  named.def_ro("num_shards", &NamedStep::num_shards);
  named.def_ro("step", &NamedStep::step);
  named.def_ro("degree", &NamedStep::degree);
  m.def("step_table", [](const std::vector<NamedStep>& steps) { return step_table(steps); });
  m.def(
      "chrome_trace", [](const std::vector<NamedStep>& steps) { return chrome_trace(steps); },
      pure_call);
  m.def(
      "compare_plans",
      [](const std::vector<std::int64_t>& lengths, const PlannerOptions& planner,
         std::int32_t degree, std::int64_t head_dim) {
        return compare_plans(lengths, {.planner = planner, .degree = degree, .head_dim = head_dim});
      },
      "doc_lengths"_a, "planner"_a, "degree"_a, "head_dim"_a, pure_call);
}

void bind_cost_model(nb::module_& m) {
  bind_prediction(m);
  bind_named(m);
  bind_of_plan<QkvPlan>(m);
  bind_of_plan<AttentionPlan>(m);
  nb::class_<BatchTables> batch(m, "BatchTables");
  batch.def(nb::init<const QkvPlan&, const VarlenRouting&, const PlannerOptions&, std::string_view,
                     const RelaySchedule*>(),
            "plan"_a, "routing"_a, "options"_a, "use"_a, "given"_a.none(), nb::keep_alive<1, 2>(),
            nb::keep_alive<1, 3>(), pure_call);
  batch.def_ro("relay", &BatchTables::relay);
  batch.def_ro("sums", &BatchTables::sums);
  bind_of_plan<BatchTables>(m);
  const auto bind_static = [&](const char* name, auto* make) {
    m.def(
        name,
        [name, make](const std::vector<std::int64_t>& lengths, std::int32_t world_size,
                     std::int64_t tokens_per_rank, std::int32_t degree, std::string_view mask) {
          return make(lengths,
                      {world_size, tokens_per_rank, degree, {.kind = mask_from_name(name, mask)}});
        },
        pure_call);
  };
  bind_static("zigzag_plan", &zigzag_plan);
  bind_static("per_document_plan", &per_document_plan);
  m.def("static_degree", &StaticPlanOptions::degree_of);
}

}  // namespace

void bind_plan(nb::module_& m) {
  m.def("make_plan", make_plan, "world_size"_a, "rank_shard_offsets"_a, "shard_len"_a, "q_dst"_a,
        "doc_shard_offsets"_a, "doc_shards"_a, "kv_begin"_a, "kv_end"_a, "kv_layout"_a, "mask"_a);
  nb::class_<QkvPlan> plan(m, "Plan");
  plan.def_ro("world_size", &QkvPlan::world_size);
  plan.def_prop_ro("kv_layout", [](const QkvPlan& p) { return to_string(p.kv_layout); });
  add_table(plan, "rank_shard_offsets", &QkvPlan::rank_shard_offsets);
  add_table(plan, "shard_len", &QkvPlan::shard_len);
  add_table(plan, "q_dst", &QkvPlan::q_dst);
  add_table(plan, "doc_shard_offsets", &QkvPlan::doc_shard_offsets);
  add_table(plan, "doc_shards", &QkvPlan::doc_shards);
  add_table(plan, "kv_begin", &QkvPlan::kv_begin);
  add_table(plan, "kv_end", &QkvPlan::kv_end);
  plan.def(nb::self == nb::self);
  plan.def("to_json",
           [](const QkvPlan& p, bool compact) { return to_json(p, json_style(compact)); });
  plan.def(
      "to_metadata",
      [](const QkvPlan& p, int num_threads) {
        return to_dense(compute_qkv_routing(p, num_threads));
      },
      "num_threads"_a, pure_call);
  plan.def("to_raw_dispatch", to_raw_dispatch, "max_cp_degree"_a, pure_call);
  plan.def("shard_work", [](const QkvPlan& p) { return numpy_array(shard_work(p)); });
  plan.def("rank_work", [](const QkvPlan& p) { return numpy_array(rank_work(p)); });
  plan.def("traffic", &traffic);
  plan.def(
      "summary_text",
      [](const QkvPlan& p, std::int64_t q_row_bytes, std::int64_t kv_row_bytes, double gb_per_s,
         bool unicode) {
        return summary_text(p, {q_row_bytes, kv_row_bytes},
                            {.unicode = unicode, .gb_per_s = gb_per_s});
      },
      "q_row_bytes"_a, "kv_row_bytes"_a, "gb_per_s"_a, "unicode"_a, pure_call);
  plan.def(
      "report_page",
      [](const QkvPlan& p, std::int64_t q_row_bytes, std::int64_t kv_row_bytes, double gb_per_s,
         const std::string& title) {
        return report_page(p, {q_row_bytes, kv_row_bytes}, gb_per_s, title);
      },
      "q_row_bytes"_a, "kv_row_bytes"_a, "gb_per_s"_a, "title"_a, pure_call);
  m.def(
      "plan_from_json",
      [](std::string_view text, std::string_view origin) { return plan_from_json(text, origin); },
      "text"_a, "origin"_a, pure_call);
  bind_sparse(m);
}

void bind_planner(nb::module_& m) {
  nb::class_<PlannerOptions>(m, "PlannerOptions");
  m.def("planner_options", planner_options_py, "world_size"_a, "tokens_per_rank"_a, "q_hidden"_a,
        "kv_hidden"_a, "dtype"_a, "mask"_a, "window"_a, "chunk"_a, "prefix"_a, "prefixes"_a,
        "max_tokens_per_rank"_a, "relay"_a, "kv_layout"_a, "block_tokens"_a, "ranks_per_node"_a,
        "imbalance_target"_a, "byte_weight"_a, "message_seconds"_a, "pairs_per_second"_a,
        "nvlink_bytes_per_second"_a, "network_bytes_per_second"_a, "row_pairs"_a, "shard_pairs"_a,
        "tails"_a);
  nb::class_<RelaySchedule> relay(m, "RelaySchedule");
  relay.def_prop_ro("empty", &RelaySchedule::empty);
  relay.def("hops", &hop_tuples);
  nb::class_<AttentionPlan> plan(m, "AttentionPlan");
  add_figures(plan);
  plan.def_ro("plan", &AttentionPlan::plan);
  plan.def("text", [](const AttentionPlan& p) { return to_string(p); });
  plan.def(
      "summary_text",
      [](const AttentionPlan& p, double gb_per_s) {
        return summary_text(p.plan, row_bytes_of(p), {.gb_per_s = gb_per_s}, relay_limit_of(p));
      },
      "gb_per_s"_a, pure_call);
  plan.def(
      "report_page",
      [](const AttentionPlan& p, double gb_per_s, const std::string& title) {
        return report_page(p.plan, row_bytes_of(p), gb_per_s, title, relay_limit_of(p));
      },
      "gb_per_s"_a, "title"_a, pure_call);
  plan.def(nb::self == nb::self);
  plan.def(
      "to_json",
      [](const AttentionPlan& p, bool compact) { return to_json(p, json_style(compact)); },
      pure_call);
  plan.def("validate", [](const AttentionPlan& p, std::int64_t max_findings) {
    return finding_tuples(unlocked([&] { return validate(p, {.max_findings = max_findings}); }));
  });
  m.def(
      "plan_attention",
      [](const std::vector<std::int64_t>& lengths, const PlannerOptions& options) {
        return plan_attention(lengths, options);
      },
      "doc_lengths"_a, "options"_a, pure_call);
  m.def(
      "plan_attention",
      [](const std::vector<std::vector<std::int64_t>>& lengths, const PlannerOptions& options) {
        return plan_attention(lengths, options);
      },
      "rank_doc_lengths"_a, "options"_a, pure_call);
  m.def(
      "check_planner_options",
      [](const PlannerOptions& options, const std::string& who) { options.check(who.c_str()); },
      "options"_a, "who"_a);
  m.def(
      "plan_pieces",
      [](const std::vector<std::int64_t>& counts, const std::vector<std::int64_t>& pieces,
         const PlannerOptions& options) {
        return plan_pieces(rank_pieces_from(counts, pieces), options);
      },
      "counts"_a, "pieces"_a, "options"_a, pure_call);
  m.def(
      "attention_plan_from_json",
      [](std::string_view text, std::string_view origin) {
        return attention_plan_from_json(text, origin);
      },
      "text"_a, "origin"_a, pure_call);
  bind_cost_model(m);
}

}  // namespace waybill::python
