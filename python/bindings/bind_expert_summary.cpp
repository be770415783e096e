#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "waybill/moe/expert_routing.h"
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

}  // namespace

void bind_expert_summary(nb::module_& m) {
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
