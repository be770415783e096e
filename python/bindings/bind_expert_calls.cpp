#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "waybill/core/error.h"
#include "waybill/cost_model/predict_experts.h"
#include "waybill/moe/expert_routing.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

void take(const nb::dict& given, const char* name, double& field) {
  if (given.contains(name)) field = nb::cast<double>(given[name]);
}

ExpertPath path_of(std::string_view name) {
  if (name == to_string(ExpertPath::waiting)) return ExpertPath::waiting;
  require(name == to_string(ExpertPath::pipelined), "predict: path = \"", name,
          "\", expected \"waiting\" or \"pipelined\"");
  return ExpertPath::pipelined;
}

ExpertCostOptions options_of(const nb::dict& given, std::int64_t num_sms, std::string_view path) {
  ExpertCostOptions options;
  take(given, "nvlink", options.links.nvlink_bytes_per_second);
  take(given, "network", options.links.network_bytes_per_second);
  take(given, "block", options.links.block_bytes_per_second);
  take(given, "message_seconds", options.message_seconds);
  take(given, "phase_seconds", options.step.phase_seconds);
  take(given, "network_message_seconds", options.step.network_message_seconds);
  take(given, "network_post_seconds", options.step.network_post_seconds);
  take(given, "path_bytes_per_second", options.costs.path_bytes_per_second);
  require(1 <= num_sms && num_sms <= 1 << 20, "predict: num_sms = ", num_sms, ", expected 1..",
          1 << 20);
  options.costs.num_sms = static_cast<std::int32_t>(num_sms);
  options.costs.path = path_of(path);
  return options;
}

nb::object links_of(const ExpertCallPrediction& call, std::int64_t LinkBytes::*side) {
  std::vector<std::int64_t> bytes;
  for (const LinkBytes& links : call.links) bytes.push_back(links.*side);
  return numpy_array(std::move(bytes));
}

nb::dict call_py(const ExpertCallPrediction& call) {
  nb::dict result;
  result["call"] = std::string(to_string(call.kind));
  result["seconds"] = call.seconds;
  result["begin_seconds"] = call.begin_seconds;
  result["beside_seconds"] = call.beside_seconds;
  result["network_seconds"] = call.network_seconds;
  result["nvlink_seconds"] = call.nvlink_seconds;
  result["block_seconds"] = call.block_seconds;
  result["end_seconds"] = call.end_seconds;
  result["rank"] = call.rank;
  result["nvlink_in"] = links_of(call, &LinkBytes::nvlink_in);
  result["nvlink_out"] = links_of(call, &LinkBytes::nvlink_out);
  result["network_in"] = links_of(call, &LinkBytes::network_in);
  result["network_out"] = links_of(call, &LinkBytes::network_out);
  result["puts"] = numpy_array(std::vector<std::int64_t>(call.puts));
  return result;
}

nb::list predict_py(const EPConfig& config, const EPDispatchOptions& dispatch,
                    const std::vector<PayloadArg>& ids, const nb::dict& given, std::int64_t num_sms,
                    std::string_view path) {
  const ExpertCostOptions options = options_of(given, num_sms, path);
  std::vector<std::vector<std::int32_t>> read;
  for (const PayloadArg& array : ids)
    read.push_back(read_expert_ids(config, dispatch, tensor_view(array, "int64"), "predict"));
  const auto calls = unlocked([&] { return predict_experts(config, dispatch, read, options); });
  nb::list result;
  for (const ExpertCallPrediction& call : calls) result.append(call_py(call));
  return result;
}

}  // namespace

void bind_expert_calls(nb::module_& m) {
  m.def("predict_experts", predict_py, "config"_a, "options"_a, "ids"_a, "given"_a, "num_sms"_a,
        "path"_a);
}

}  // namespace waybill::python
