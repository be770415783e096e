#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "planner_options.h"
#include "waybill/core/dtype.h"
#include "waybill/core/error.h"
#include "waybill/cost_model/compare_plans.h"
#include "waybill/planner/static_plans.h"
#include "waybill/report/step_report.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

/// Sets `field` where the caller gave a number.
template <class Number>
void set(const nb::dict& given, const char* name, Number& field) {
  if (!given.contains(name)) return;
  if constexpr (std::is_integral_v<Number>) {
    const auto value = nb::cast<std::int64_t>(given[name]);
    require(std::in_range<Number>(value), "predict_step: ", name, " = ", value,
            ", expected at most ", std::numeric_limits<Number>::max());
    field = static_cast<Number>(value);
  } else {
    field = nb::cast<Number>(given[name]);
  }
}

TransferMode transfer_of(std::string_view name) {
  const std::optional<TransferMode> transfer = transfer_from_name(name);
  require(transfer.has_value(), "predict_step: transfer = \"", name,
          "\", expected \"auto\", \"direct\", \"once_per_node\" or \"relay\"");
  return *transfer;
}

void set_costs(const nb::dict& given, StepCosts& costs) {
  set(given, "phase_seconds", costs.phase_seconds);
  set(given, "pull_share", costs.pull_share);
  set(given, "forward_share", costs.forward_share);
  set(given, "network_message_seconds", costs.network_message_seconds);
  set(given, "forward_chunk_bytes", costs.forward_chunk_bytes);
  set(given, "forward_flops_per_second", costs.forward_flops_per_second);
  set(given, "backward_flops_per_second", costs.backward_flops_per_second);
}

/// The options with what the caller gave in place of theirs; "auto" leaves the transfer.
StepOptions changed(StepOptions options, const nb::dict& given, std::string_view transfer) {
  set(given, "q_hidden", options.model.q_hidden);
  set(given, "kv_hidden", options.model.kv_hidden);
  if (given.contains("dtype"))
    options.model.dtype = dtype_from_name(nb::cast<std::string>(given["dtype"]));
  set(given, "window", options.mask.window);
  set(given, "nvlink_bytes_per_second", options.hardware.nvlink_bytes_per_second);
  set(given, "network_bytes_per_second", options.hardware.network_bytes_per_second);
  set(given, "ranks_per_node", options.hardware.ranks_per_node);
  set(given, "message_seconds", options.hardware.message_seconds);
  set(given, "pairs_per_second", options.hardware.pairs_per_second);
  set(given, "row_pairs", options.hardware.row_pairs);
  set(given, "shard_pairs", options.hardware.shard_pairs);
  set_costs(given, options.costs);
  if (transfer != "auto") options.transfer = transfer_of(transfer);
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

nb::object link_array(const PhasePrediction& phase, std::size_t world_size,
                      std::int64_t LinkBytes::*side) {
  std::vector<std::int64_t> bytes(world_size, 0);
  for (std::size_t r = 0; r < phase.links.size(); ++r) bytes[r] = phase.links[r].*side;
  return numpy_array(std::move(bytes));
}

nb::list phase_tuples(const StepPrediction& step) {
  nb::list phases;
  const auto world_size = static_cast<std::size_t>(step.world_size);
  for (const PhasePrediction& phase : step.phases) {
    phases.append(nb::make_tuple(std::string(to_string(phase.phase)), array(phase.begin),
                                 array(phase.end), array(phase.seconds), array(phase.waits_for),
                                 link_array(phase, world_size, &LinkBytes::nvlink_in),
                                 link_array(phase, world_size, &LinkBytes::nvlink_out),
                                 link_array(phase, world_size, &LinkBytes::network_in),
                                 link_array(phase, world_size, &LinkBytes::network_out),
                                 cause_tuple(phase.slowest)));
  }
  return phases;
}

nb::list cause_tuples(const std::vector<StepCause>& causes) {
  nb::list tuples;
  for (const StepCause& cause : causes) tuples.append(cause_tuple(cause));
  return tuples;
}

nb::list remedy_tuples(const std::vector<Remedy>& remedies) {
  nb::list tuples;
  for (const Remedy& remedy : remedies)
    tuples.append(nb::make_tuple(std::string(to_string(remedy.kind)), remedy.seconds));
  return tuples;
}

std::vector<Remedy> remedies_of(const StepPredictor& predictor, const StepPrediction& step) {
  return unlocked([&] { return step_remedies(predictor, step); });
}

/// Functions that need the plan again; `Plan` is a QkvPlan or an AttentionPlan.
template <class Plan>
void bind_of_plan(nb::module_& m) {
  m.def(
      "predict_step",
      [](const Plan& plan, const nb::dict& given, std::string_view transfer) {
        StepOptions base;
        if constexpr (std::is_same_v<Plan, AttentionPlan>) base = StepOptions::of(plan);
        const StepOptions options = changed(base, given, transfer);
        return unlocked([&] { return predict_step(plan, options); });
      },
      "plan"_a, "given"_a, "transfer"_a);
  m.def("step_remedies", [](const Plan& plan, const StepPrediction& step) {
    return remedy_tuples(remedies_of(StepPredictor(plan), step));
  });
  m.def("explain_step", [](const Plan& plan, const StepPrediction& step) {
    return explain_step(step, remedies_of(StepPredictor(plan), step));
  });
}

void bind_prediction(nb::module_& m) {
  nb::class_<StepPrediction> step(m, "StepPrediction");
  step.def_ro("world_size", &StepPrediction::world_size);
  step.def_ro("seconds", &StepPrediction::seconds);
  step.def_ro("forward_seconds", &StepPrediction::forward_seconds);
  step.def_prop_ro("work", [](nb::handle self) {
    return numpy_view(nb::cast<const StepPrediction&>(self).work, self);
  });
  step.def_prop_ro("transfer", [](const StepPrediction& s) {
    return std::string(to_string(s.options.transfer));
  });
  step.def("phases", &phase_tuples);
  step.def("path", [](const StepPrediction& s) { return cause_tuples(s.path); });
  step.def("bottleneck", [](const StepPrediction& s) { return cause_tuple(s.bottleneck()); });
  step.def("phase_table", [](const StepPrediction& s) { return phase_table(s); });
  step.def("rank_table", [](const StepPrediction& s, std::int32_t r) { return rank_table(s, r); });
  step.def(
      "__eq__", [](const StepPrediction& a, const StepPrediction& b) { return a == b; },
      nb::is_operator());
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
  m.def("compare_plans", [](const std::vector<std::int64_t>& lengths, const nb::dict& planner,
                            const nb::dict& costs, std::int32_t degree) {
    CompareOptions options{.planner = planner_options_from(planner), .degree = degree};
    set_costs(costs, options.costs);
    return unlocked([&] { return compare_plans(lengths, options); });
  });
}

}  // namespace

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

}  // namespace waybill::python
