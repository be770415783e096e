#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "moe/option_names.h"
#include "waybill/core/error.h"
#include "waybill/moe/quantize.h"
#include "waybill/moe/simulate.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

EPConfig config_from(const std::vector<std::int64_t>& sizes, std::string_view token_dtype,
                     std::string_view weight_dtype, const std::string& who,
                     const FieldNames& called) {
  require(sizes.size() == 7, "EPConfig: got ", sizes.size(), " sizes, expected 7");
  return detail::checked_config({.max_tokens = sizes[0],
                                 .hidden = sizes[1],
                                 .topk = sizes[2],
                                 .num_experts = sizes[3],
                                 .rank = sizes[4],
                                 .world_size = sizes[5],
                                 .local_world_size = sizes[6],
                                 .token_dtype = dtype_from_name(token_dtype),
                                 .weight_dtype = dtype_from_name(weight_dtype)},
                                who.c_str(), called);
}

EPDispatchOptions options_from(const EPConfig& config, std::optional<std::int64_t> dropped_id,
                               std::string_view rows, std::int64_t expert_alignment,
                               std::string_view payload, const std::string& who,
                               const FieldNames& called) {
  const EPDispatchOptions options = {
      .dropped_id = detail::checked_dropped_id(dropped_id, config, who.c_str(), called),
      .rows = detail::option_of<EPRows>(detail::row_names, rows, (who + ": rows").c_str()),
      .expert_alignment = expert_alignment,
      .payload = detail::option_of<EPPayload>(detail::payload_names, payload,
                                              (who + ": payload").c_str())};
  options.check(config, who.c_str(), called);
  return options;
}

std::vector<ConstTensorView> views_of(const std::vector<PayloadArg>& arrays,
                                      std::string_view dtype) {
  std::vector<ConstTensorView> views;
  views.reserve(arrays.size());
  for (const PayloadArg& array : arrays) views.push_back(tensor_view(array, dtype));
  return views;
}

nb::dict layout_dict(EPAllToAllLayoutDesc&& layout) {
  nb::dict result;
  result["num_dispatch_token_cur_rank"] = layout.num_dispatch_token_cur_rank;
  result["num_input_tokens_per_rank"] = numpy_array(std::move(layout.num_input_tokens_per_rank));
  result["send_reqs_recv_tensor"] = numpy_or_none(std::move(layout.send_reqs_recv_tensor));
  result["topk_indices_tensor"] = numpy_array(std::move(layout.topk_indices_tensor));
  result["token_dst_scatter_idx"] = numpy_array(std::move(layout.token_dst_scatter_idx));
  result["skipped_token_mapping_indices"] =
      numpy_or_none(std::move(layout.skipped_token_mapping_indices));
  result["skipped_token_topk_mapping_indices"] =
      numpy_or_none(std::move(layout.skipped_token_topk_mapping_indices));
  result["recv_expert_counts"] = numpy_array(std::move(layout.recv_expert_counts));
  result["recv_expert_offsets"] = numpy_array(std::move(layout.recv_expert_offsets));
  result["recv_topk_indices"] = numpy_or_none(std::move(layout.recv_topk_indices));
  result["compact_to_grouped"] = numpy_or_none(std::move(layout.compact_to_grouped));
  result["grouped_to_compact"] = numpy_or_none(std::move(layout.grouped_to_compact));
  return result;
}

nb::list tensors_list(std::vector<HostTensor>&& tensors) {
  nb::list result;
  for (HostTensor& tensor : tensors) result.append(numpy_array(std::move(tensor)));
  return result;
}

nb::object int32_table(const std::vector<std::int32_t>& values, Shape shape) {
  return numpy_array(IndexArray::copy_of(values.data(), shape, DType::int32));
}

nb::dict tables_dict(ExpertDispatch& dispatch) {
  const EPConfig& config = dispatch.config;
  const std::int64_t world = config.world_size;
  nb::dict result;
  result["splits"] = int32_table(dispatch.rows.splits, {world, config.num_experts + 1});
  result["num_input_tokens_per_rank"] = int32_table(dispatch.rows.num_input_tokens, {world});
  result["num_recv_tokens_per_rank"] = int32_table(dispatch.rows.num_recv_rows, {world});
  result["recv_buf_offset_per_expert"] =
      int32_table(dispatch.rows.segment_offsets, {world, config.num_experts_per_rank(), world});
  nb::dict traffic;
  ExpertTraffic& from = dispatch.traffic;
  traffic["rows_per_rank_pair"] = numpy_array(std::move(from.rows_per_rank_pair));
  traffic["unique_tokens_per_rank_pair"] = numpy_array(std::move(from.unique_tokens_per_rank_pair));
  traffic["inter_node_tokens"] = numpy_array(std::move(from.inter_node_tokens));
  traffic["inter_node_ranges"] = numpy_array(std::move(from.inter_node_ranges));
  traffic["crossings"] = numpy_array(std::move(from.crossings));
  result["traffic"] = traffic;
  return result;
}

nb::tuple dispatch_py(const EPConfig& config, const EPDispatchOptions& options,
                      const std::vector<PayloadArg>& tokens, std::string_view token_dtype,
                      const std::vector<PayloadArg>& ids, const std::vector<PayloadArg>& weights,
                      const std::vector<PayloadArg>& scales,
                      const std::optional<PayloadArg>& positions) {
  const auto token_views = views_of(tokens, token_dtype);
  const auto id_views = views_of(ids, "int64");
  const auto weight_views = views_of(weights, dtype_name(config.weight_dtype));
  const auto scale_views = views_of(scales, "float32");
  ExpertInputs inputs{token_views, id_views, weight_views, scale_views, std::nullopt};
  if (positions) inputs.full_scatter_indices = tensor_view(*positions, "int64");
  auto dispatch = std::make_shared<ExpertDispatch>(
      unlocked([&] { return simulate_expert_dispatch(config, inputs, options); }));
  nb::list layouts;
  for (EPAllToAllLayoutDesc& layout : dispatch->layout) {
    layouts.append(layout_dict(std::move(layout)));
  }
  nb::list tokens_out = tensors_list(std::move(dispatch->recv_tokens));
  nb::list scales_out = tensors_list(std::move(dispatch->recv_scales));
  nb::list weights_out = tensors_list(std::move(dispatch->recv_weights));
  nb::list origins = numpy_arrays(std::move(dispatch->recv_origin));
  nb::dict tables = tables_dict(*dispatch);
  return nb::make_tuple(nb::cast(std::move(dispatch)), tokens_out, scales_out, weights_out, origins,
                        layouts, tables);
}

nb::list combine_py(const ExpertDispatch& dispatch, const std::vector<PayloadArg>& outputs,
                    const std::vector<std::vector<PayloadArg>>& biases, bool local_combine,
                    bool weighted) {
  const std::string_view dtype = dtype_name(dispatch.config.token_dtype);
  const auto output_views = views_of(outputs, dtype);
  std::vector<std::vector<ConstTensorView>> bias_views;
  for (const auto& bias : biases) bias_views.push_back(views_of(bias, dtype));
  const std::vector<std::span<const ConstTensorView>> spans(bias_views.begin(), bias_views.end());
  return tensors_list(unlocked([&] {
    return simulate_expert_combine(dispatch, output_views, {local_combine, weighted}, spans);
  }));
}

nb::tuple quantize_py(const PayloadArg& rows, std::string_view dtype) {
  const ConstTensorView from = tensor_view(rows, dtype);
  require(from.ndim() == 2 && from.shape[1] % scale_group == 0 &&
              (from.shape[0] == 0 || from.strides[1] == 1),
          "quantize_fp8: rows have shape ", to_string(from.shape),
          ", expected [rows, a multiple of ", scale_group, "] with adjacent elements");
  const auto hidden = static_cast<std::size_t>(from.shape[1]);
  HostTensor elements(DType::float8_e4m3fn, from.shape);
  HostTensor scales(DType::float32, {from.shape[0], from.shape[1] / scale_group});
  for (std::int64_t row = 0; row < from.shape[0]; ++row) {
    const auto r = static_cast<std::size_t>(row);
    const std::size_t groups = hidden / static_cast<std::size_t>(scale_group);
    quantize_row(from.data + row * from.strides[0] * dtype_bytes(from.dtype), from.dtype,
                 elements.as<std::uint8_t>().subspan(r * hidden, hidden),
                 scales.as<float>().subspan(r * groups, groups));
  }
  return nb::make_tuple(numpy_array(std::move(elements)), numpy_array(std::move(scales)));
}

}  // namespace

void bind_moe(nb::module_& m) {
  nb::class_<EPConfig>(m, "EPConfig");
  nb::class_<EPDispatchOptions>(m, "EPDispatchOptions");
  nb::class_<ExpertDispatch>(m, "ExpertDispatch")
      .def("combine", combine_py, "outputs"_a, "biases"_a, "local_combine"_a, "weighted"_a);
  m.attr("ep_row_names") = tuple_of(detail::row_names);
  m.attr("ep_payload_names") = tuple_of(detail::payload_names);
  m.def("ep_config", config_from, "sizes"_a, "token_dtype"_a, "weight_dtype"_a, "who"_a,
        "called"_a);
  m.def("ep_dispatch_options", options_from, "config"_a, "dropped_id"_a.none(), "rows"_a,
        "expert_alignment"_a, "payload"_a, "who"_a, "called"_a);
  m.def("simulate_expert_dispatch", dispatch_py, "config"_a, "options"_a, "tokens"_a,
        "token_dtype"_a, "ids"_a, "weights"_a, "scales"_a, "positions"_a.none());
  m.def("grown_output_rows", grown_output_rows, "rows"_a, "largest"_a);
  m.def("quantize_rows", quantize_py, "rows"_a, "dtype"_a);
}

}  // namespace waybill::python
