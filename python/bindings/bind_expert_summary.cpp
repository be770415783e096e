#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "waybill/core/error.h"
#include "waybill/moe/expert_routing.h"
#include "waybill/planner/expert_balance.h"
#include "waybill/report/expert_summary.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

ExpertSummary summarize_py(const EPConfig& config, const EPDispatchOptions& options,
                           const std::vector<PayloadArg>& ids) {
  std::vector<std::vector<std::int32_t>> read;
  for (const PayloadArg& array : ids)
    read.push_back(read_expert_ids(config, options, tensor_view(array, "int64"), "summarize"));
  return unlocked([&] { return summarize_experts(config, options, read); });
}

nb::object column(const std::vector<std::int64_t>& values) {
  return numpy_array(IndexArray::copy_of(values.data(), {std::ssize(values)}, DType::int64));
}

nb::dict figures_py(const ExpertSummary& summary) {
  const auto of_ranks = [&](std::int64_t ExpertRankFigures::*figure) {
    std::vector<std::int64_t> values;
    for (const ExpertRankFigures& rank : summary.ranks) values.push_back(rank.*figure);
    return column(values);
  };
  nb::dict result;
  result["tokens"] = of_ranks(&ExpertRankFigures::tokens);
  result["dropped"] = of_ranks(&ExpertRankFigures::dropped);
  result["computed"] = of_ranks(&ExpertRankFigures::computed);
  result["received"] = of_ranks(&ExpertRankFigures::received);
  result["node_in"] = of_ranks(&ExpertRankFigures::node_in);
  result["node_out"] = of_ranks(&ExpertRankFigures::node_out);
  result["network_in"] = of_ranks(&ExpertRankFigures::network_in);
  result["network_out"] = of_ranks(&ExpertRankFigures::network_out);
  result["expert_choices"] = column(summary.expert_entries);
  return result;
}

nb::object placement_py(const ExpertSummary& summary) {
  const std::vector<std::int32_t> ranks = place_experts(summary);
  return column({ranks.begin(), ranks.end()});
}

EvenExperts even_experts_of(const ArrayArg& rows, std::int64_t spare_experts,
                            const std::vector<std::int32_t>& present, std::int64_t min_rows,
                            double limit, std::int64_t alignment) {
  require(rows.ndim() == 2, "even_experts: rows has ", rows.ndim(),
          " axes, expected [num_ranks, num_experts]");
  constexpr std::int64_t max_extent = std::numeric_limits<std::int32_t>::max();
  const std::int64_t num_ranks = rows.shape(0), num_experts = rows.shape(1);
  require(num_ranks <= max_extent && num_experts <= max_extent, "even_experts: rows is ", num_ranks,
          " x ", num_experts, ", expected at most 2^31 - 1 ranks and experts");
  require(spare_experts >= 0 && spare_experts <= max_extent,
          "even_experts: spare_experts = ", spare_experts,
          ", expected 0 to num_experts = ", num_experts);
  const IndexArray table = index_array(rows, "rows");
  const Int64View numbers(table);
  return unlocked([&] {
    return even_experts(numbers.span(), static_cast<std::int32_t>(num_ranks),
                        static_cast<std::int32_t>(num_experts),
                        {.spare_experts = static_cast<std::int32_t>(spare_experts),
                         .present = present,
                         .min_rows = min_rows,
                         .limit = limit,
                         .alignment = alignment});
  });
}

template <class Number>
auto table_of(std::vector<Number> EvenExperts::*table) {
  return [table](nb::handle self) {
    return numpy_view(nb::cast<const EvenExperts&>(self).*table, self);
  };
}

using LoadArg = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::dict expert_placement_of(const LoadArg& loads, const std::vector<std::int32_t>& present,
                             const nb::dict& options) {
  const auto number = [&](const char* name) { return nb::cast<std::int32_t>(options[name]); };
  ExpertPlacementOptions given{.num_ranks = number("num_ranks"),
                               .slots_per_rank = number("slots_per_rank"),
                               .num_nodes = number("num_nodes"),
                               .num_groups = number("num_groups"),
                               .present = present,
                               .max_moves = nb::cast<std::int64_t>(options["max_moves"])};
  const auto num_layers = static_cast<std::int64_t>(loads.shape(0));
  const auto num_experts = static_cast<std::int32_t>(loads.shape(1));
  ExpertPlacement plan = unlocked([&] {
    return plan_expert_placement({loads.data(), loads.size()}, num_layers, num_experts, given);
  });
  const auto integers = [&](const std::vector<std::int32_t>& values) {
    return numpy_array(IndexArray::copy_of(values.data(), {std::ssize(values)}, DType::int32));
  };
  nb::dict fields;
  fields["slots"] = integers(plan.slots);
  fields["copies"] = integers(plan.copies);
  fields["rank_loads"] = std::move(plan.rank_loads);
  fields["moves"] = integers(plan.moves);
  return fields;
}

}  // namespace

void bind_expert_summary(nb::module_& m) {
  m.def("plan_expert_placement", &expert_placement_of, "loads"_a, "present"_a, "options"_a);
  nb::class_<EvenExperts>(m, "EvenExperts")
      .def_prop_ro("slots", table_of(&EvenExperts::slots))
      .def_prop_ro("quotas", table_of(&EvenExperts::quotas))
      .def_prop_ro("local_rows", table_of(&EvenExperts::local_rows))
      .def_prop_ro("first_row", table_of(&EvenExperts::first_row))
      .def_prop_ro("weights_out", table_of(&EvenExperts::weights_out))
      .def_prop_ro("weights_in", table_of(&EvenExperts::weights_in))
      .def_ro("max_rows", &EvenExperts::max_rows)
      .def_ro("mean_rows", &EvenExperts::mean_rows)
      .def_ro("bound", &EvenExperts::bound);
  m.def("even_experts", &even_experts_of, "rows"_a, "spare_experts"_a, "present"_a, "min_rows"_a,
        "limit"_a, "alignment"_a);
  nb::class_<ExpertSummary>(m, "ExpertSummary")
      .def_ro("row_bytes", &ExpertSummary::row_bytes)
      .def("figures", figures_py)
      .def("placement", placement_py)
      .def(
          "limit_seconds",
          [](const ExpertSummary& summary, double nvlink, double network) {
            return summary.limit({nvlink, network}).seconds;
          },
          "nvlink"_a, "network"_a)
      .def(
          "explain",
          [](const ExpertSummary& summary, double nvlink, double network) {
            return explain_experts(summary, {nvlink, network});
          },
          "nvlink"_a, "network"_a)
      .def(
          "text",
          [](const ExpertSummary& summary, double nvlink, double network) {
            return expert_text(summary, {nvlink, network});
          },
          "nvlink"_a, "network"_a);
  m.def("summarize_experts", summarize_py, "config"_a, "options"_a, "ids"_a);
}

}  // namespace waybill::python
