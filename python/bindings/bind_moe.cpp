#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "moe/option_names.h"
#include "waybill/core/error.h"
#include "waybill/cost_model/predict_experts.h"
#include "waybill/moe/expert_routing.h"
#include "waybill/moe/payload_format.h"
#include "waybill/moe/simulate.h"
#include "waybill/planner/expert_balance.h"
#include "waybill/report/expert_copies.h"
#include "waybill/report/expert_summary.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

EPConfig config_py(std::int64_t max_tokens, std::int64_t hidden, std::int32_t topk,
                   std::int32_t num_experts, std::int32_t rank, std::int32_t world_size,
                   std::int32_t local_world_size, std::string_view token_dtype,
                   std::string_view weight_dtype) {
  const EPConfig config{.max_tokens = max_tokens,
                        .hidden = hidden,
                        .topk = topk,
                        .num_experts = num_experts,
                        .rank = rank,
                        .world_size = world_size,
                        .local_world_size = local_world_size,
                        .token_dtype = dtype_from_name(token_dtype),
                        .weight_dtype = dtype_from_name(weight_dtype)};
  config.check("EPConfig");
  return config;
}

EPDispatchOptions dispatch_options_py(const EPConfig& config,
                                      std::optional<std::int32_t> dropped_id, std::string_view rows,
                                      std::int64_t expert_alignment, std::string_view payload,
                                      std::int32_t spare_experts, double limit,
                                      std::int64_t min_rows) {
  const EPDispatchOptions options = {
      .dropped_id = dropped_id,
      .rows = detail::option_of<EPRows>(detail::row_names, rows, "EPDispatchOptions: rows"),
      .expert_alignment = expert_alignment,
      .payload = EPPayload::from_name(payload, "EPDispatchOptions: payload"),
      .spare_experts = spare_experts,
      .limit = limit,
      .min_rows = min_rows};
  options.check(config, "EPDispatchOptions");
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
  result["slot_experts"] = numpy_or_none(std::move(layout.slot_experts));
  result["all_slot_experts"] = numpy_or_none(std::move(layout.all_slot_experts));
  result["all_slot_quotas"] = numpy_or_none(std::move(layout.all_slot_quotas));
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

nb::tuple simulate_dispatch_py(const EPConfig& config, const EPDispatchOptions& options,
                               const std::vector<PayloadArg>& tokens, std::string_view token_dtype,
                               const std::vector<PayloadArg>& ids,
                               const std::vector<PayloadArg>& weights,
                               const std::vector<PayloadArg>& scales,
                               const std::optional<PayloadArg>& positions,
                               const std::vector<std::int32_t>& present) {
  const auto token_views = views_of(tokens, token_dtype);
  const auto id_views = views_of(ids, "int64");
  const auto weight_views = views_of(weights, dtype_name(config.weight_dtype));
  const auto scale_views = views_of(scales, dtype_name(options.payload.scale_dtype()));
  ExpertInputs inputs{token_views, id_views, weight_views, scale_views, std::nullopt, present};
  if (positions) inputs.full_scatter_indices = tensor_view(*positions, "int64");
  auto dispatch = std::make_shared<ExpertDispatch>(
      unlocked([&] { return simulate_expert_dispatch(config, inputs, options); }));
  nb::list layouts;
  for (EPAllToAllLayoutDesc& layout : dispatch->layout) {
    layouts.append(layout_dict(std::move(layout)));
  }
  nb::list tokens_out = numpy_arrays(std::move(dispatch->recv_tokens));
  nb::list scales_out = numpy_arrays(std::move(dispatch->recv_scales));
  nb::list weights_out = numpy_arrays(std::move(dispatch->recv_weights));
  nb::list origins = numpy_arrays(std::move(dispatch->recv_origin));
  nb::dict tables = tables_dict(*dispatch);
  return nb::make_tuple(nb::cast(std::move(dispatch)), tokens_out, scales_out, weights_out, origins,
                        layouts, tables);
}

nb::list simulate_combine_py(const ExpertDispatch& dispatch, const std::vector<PayloadArg>& outputs,
                             const std::vector<std::vector<PayloadArg>>& biases, bool local_combine,
                             bool weighted) {
  const std::string_view dtype = dtype_name(dispatch.config.token_dtype);
  const auto output_views = views_of(outputs, dtype);
  std::vector<std::vector<ConstTensorView>> bias_views;
  for (const auto& bias : biases) bias_views.push_back(views_of(bias, dtype));
  const std::vector<std::span<const ConstTensorView>> spans(bias_views.begin(), bias_views.end());
  return numpy_arrays(unlocked([&] {
    return simulate_expert_combine(dispatch, output_views, {local_combine, weighted}, spans);
  }));
}

std::span<std::uint8_t> bytes_of(HostTensor& tensor) {
  return {reinterpret_cast<std::uint8_t*>(tensor.bytes().data()), tensor.bytes().size()};
}

/// The bytes and dtypes of a payload whose rows have `hidden` elements.
nb::dict payload_py(std::string_view name, const std::string& argument, std::int64_t hidden) {
  const EPPayload payload = EPPayload::from_name(name, argument.c_str());
  const PayloadFormat& format = payload.format();
  nb::dict result;
  result["name"] = payload.name();
  result["is_plain"] = payload.is_plain();
  result["is_given"] = payload.is_given();
  result["is_bytes"] = payload.is_bytes();
  result["element_name"] = format.element_name;
  result["dtype"] = dtype_name(payload.row_dtype(DType::uint8));
  result["columns"] = payload.row_items(hidden);
  result["scale_name"] = format.scale_name;
  result["scale_dtype"] = dtype_name(payload.scale_dtype());
  result["scale_columns"] = payload.scale_items(hidden);
  result["group"] = format.group;
  result["num_groups"] = payload.num_groups(hidden);
  result["has_row_scale"] = format.has_row_scale;
  return result;
}

/// Names of the formats whose rows can be given or quantised on the way.
std::vector<std::string_view> quantised_formats() {
  std::vector<std::string_view> names;
  for (const PayloadFormat& format : payload_formats()) {
    if (format.quantize != nullptr) names.push_back(format.name);
  }
  return names;
}

nb::tuple quantize_py(const PayloadArg& rows, std::string_view dtype, std::string_view format) {
  const ConstTensorView from = tensor_view(rows, dtype);
  require(from.ndim() == 2 && (from.shape[0] == 0 || from.strides[1] == 1),
          "quantize_rows: rows have shape ", to_string(from.shape),
          ", expected [rows, hidden] with adjacent elements");
  const PayloadFormat& how = payload_format(format, "quantize_rows: format");
  const EPPayload payload(how, true);
  payload.check(from.dtype, from.shape[1], "quantize_rows: rows");
  const std::int64_t columns = payload.row_items(from.shape[1]);
  const std::int64_t scale_bytes = payload.scale_bytes(from.shape[1]);
  HostTensor elements(payload.row_dtype(from.dtype), {from.shape[0], columns});
  HostTensor scales(payload.scale_dtype(), {from.shape[0], payload.scale_items(from.shape[1])});
  for (std::int64_t row = 0; row < from.shape[0]; ++row) {
    quantize_row(how, from.data + row * from.strides[0] * dtype_bytes(from.dtype), from.dtype,
                 bytes_of(elements).subspan(row * columns, columns),
                 bytes_of(scales).subspan(row * scale_bytes, scale_bytes));
  }
  return nb::make_tuple(numpy_array(std::move(elements)), numpy_array(std::move(scales)));
}

constexpr std::array<std::string_view, 2> path_names{"waiting", "pipelined"};

ExpertCostOptions cost_options_py(double nvlink, double network, double block, std::int32_t num_sms,
                                  std::string_view path, double message_seconds,
                                  double phase_seconds, double network_message_seconds,
                                  double network_post_seconds, double path_bytes_per_second) {
  require(1 <= num_sms && num_sms <= 1 << 20, "predict: num_sms = ", num_sms, ", expected 1..",
          1 << 20);
  ExpertCostOptions options;
  options.links.nvlink_bytes_per_second = nvlink;
  options.links.network_bytes_per_second = network;
  options.links.block_bytes_per_second = block;
  options.message_seconds = message_seconds;
  options.step.phase_seconds = phase_seconds;
  options.step.network_message_seconds = network_message_seconds;
  options.step.network_post_seconds = network_post_seconds;
  options.costs.path_bytes_per_second = path_bytes_per_second;
  options.costs.num_sms = num_sms;
  options.costs.path = detail::option_of<ExpertPath>(path_names, path, "predict: path");
  return options;
}

nb::object links_of(const ExpertCallPrediction& call, std::int64_t LinkBytes::*side) {
  std::vector<std::int64_t> bytes;
  for (const LinkBytes& links : call.links) bytes.push_back(links.*side);
  return numpy_array(std::move(bytes));
}

nb::dict call_py(const ExpertCallPrediction& call) {
  nb::dict result;
  result["call"] = to_string(call.kind);
  result["seconds"] = call.seconds;
  result["begin_seconds"] = call.begin_seconds;
  result["overlapped_seconds"] = call.overlapped_seconds;
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

std::vector<std::vector<std::int32_t>> ids_from(const EPConfig& config,
                                                const EPDispatchOptions& options,
                                                const std::vector<PayloadArg>& ids,
                                                const char* who) {
  std::vector<std::vector<std::int32_t>> read;
  for (const PayloadArg& array : ids)
    read.push_back(read_expert_ids(config, options, tensor_view(array, "int64"), who));
  return read;
}

nb::list predict_py(const EPConfig& config, const EPDispatchOptions& dispatch,
                    const std::vector<PayloadArg>& ids, const ExpertCostOptions& options) {
  const auto read = ids_from(config, dispatch, ids, "predict");
  const auto calls = unlocked([&] { return predict_experts(config, dispatch, read, options); });
  nb::list result;
  for (const ExpertCallPrediction& call : calls) result.append(call_py(call));
  return result;
}

nb::dict step_py(const ExpertStepSeconds& step) {
  nb::dict result;
  result["dispatch"] = step.dispatch;
  result["cached_dispatch"] = step.cached_dispatch;
  result["combine"] = step.combine;
  result["gemm"] = step.gemm;
  result["weights"] = step.weights;
  result["gradients"] = step.gradients;
  result["forward"] = step.forward();
  result["backward"] = step.backward();
  return result;
}

nb::dict price_py(const EPConfig& config, const EPDispatchOptions& dispatch,
                  const std::vector<PayloadArg>& ids, const ExpertCostOptions& calls,
                  std::int64_t intermediate, double gemm_flops_per_second) {
  const auto read = ids_from(config, dispatch, ids, "price_copies");
  const ExpertCopyCosts costs{intermediate, gemm_flops_per_second, calls};
  const ExpertCopies copies =
      unlocked([&] { return price_expert_copies(config, dispatch, read, costs); });
  nb::dict result;
  result["rows_before"] = numpy_array(std::vector<std::int64_t>(copies.rows_before));
  result["rows_after"] = numpy_array(std::vector<std::int64_t>(copies.rows_after));
  result["num_copies"] = copies.num_copies();
  result["weight_bytes"] = copies.weight_bytes;
  result["before"] = step_py(copies.before);
  result["after"] = step_py(copies.after);
  result["explained"] = explain_expert_copies(copies, costs);
  return result;
}

std::int64_t break_even_py(const EPConfig& config, double gemm_flops_per_second,
                           double link_bytes_per_second, double weights, double gradients,
                           double gemm) {
  ExpertCopyCosts costs;
  costs.gemm_flops_per_second = gemm_flops_per_second;
  costs.calls.links.nvlink_bytes_per_second = link_bytes_per_second;
  return break_even_rows(config, costs, {weights, gradients, gemm});
}

ExpertSummary summarize_py(const EPConfig& config, const EPDispatchOptions& options,
                           const std::vector<PayloadArg>& ids) {
  return summarize_experts(config, options, ids_from(config, options, ids, "summarize"));
}

nb::dict figures_py(const ExpertSummary& summary) {
  const auto of_ranks = [&](std::int64_t ExpertRankFigures::*figure) {
    std::vector<std::int64_t> values;
    for (const ExpertRankFigures& rank : summary.ranks) values.push_back(rank.*figure);
    return numpy_array(std::move(values));
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
  result["expert_choices"] = numpy_array(std::vector<std::int64_t>(summary.expert_entries));
  return result;
}

nb::object placement_py(const ExpertSummary& summary) {
  const std::vector<std::int32_t> ranks = place_experts(summary);
  return numpy_array(std::vector<std::int64_t>(ranks.begin(), ranks.end()));
}

void bind_expert_calls(nb::module_& m) {
  nb::class_<ExpertCostOptions>(m, "ExpertCostOptions");
  const ExpertCostOptions defaults;
  m.def("expert_cost_options", cost_options_py, "nvlink_bytes_per_second"_a,
        "network_bytes_per_second"_a, "block_bytes_per_second"_a, "num_sms"_a, "path"_a,
        "message_seconds"_a = defaults.message_seconds,
        "phase_seconds"_a = defaults.step.phase_seconds,
        "network_message_seconds"_a = defaults.step.network_message_seconds,
        "network_post_seconds"_a = defaults.step.network_post_seconds,
        "path_bytes_per_second"_a = defaults.costs.path_bytes_per_second);
  m.def("predict_experts", predict_py, "config"_a, "dispatch"_a, "ids"_a, "options"_a);
  m.def("price_copies", price_py, "config"_a, "dispatch"_a, "ids"_a, "calls"_a, "intermediate"_a,
        "gemm_flops_per_second"_a);
  m.def("break_even_rows", break_even_py, "config"_a, "gemm_flops_per_second"_a,
        "link_bytes_per_second"_a, "weights"_a, "gradients"_a, "gemm"_a);
}

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
  m.def("summarize_experts", summarize_py, "config"_a, "options"_a, "ids"_a, pure_call);
}

EvenExperts even_experts_py(const IndexArray& rows, std::int32_t spare_experts,
                            const std::vector<std::int32_t>& present, std::int64_t min_rows,
                            double limit, std::int64_t alignment, std::int32_t num_nodes) {
  require(rows.ndim() == 2, "even_experts: rows has ", rows.ndim(),
          " axes, expected [num_ranks, num_experts]");
  constexpr std::int64_t max_extent = std::numeric_limits<std::int32_t>::max();
  const std::int64_t num_ranks = rows.dim(0);
  const std::int64_t num_experts = rows.dim(1);
  require(num_ranks <= max_extent && num_experts <= max_extent, "even_experts: rows is ", num_ranks,
          " x ", num_experts, ", expected at most 2^31 - 1 ranks and experts");
  const Int64View numbers(rows);
  return even_experts(numbers.span(), static_cast<std::int32_t>(num_ranks),
                      static_cast<std::int32_t>(num_experts),
                      {.spare_experts = spare_experts,
                       .present = present,
                       .min_rows = min_rows,
                       .limit = limit,
                       .alignment = alignment,
                       .num_nodes = num_nodes});
}

/// The tables of a plan are [R, slots per rank].
nb::object slot_ids_py(const IndexArray& slots, const IndexArray& quotas,
                       const IndexArray& local_rows, const IndexArray& first_row,
                       const IndexArray& rows, const IndexArray& ids, std::int32_t rank) {
  const auto int64s = [](const IndexArray& table) {
    const Int64View numbers(table);
    return std::vector<std::int64_t>(numbers.span().begin(), numbers.span().end());
  };
  require(slots.ndim() == 2, "slot_ids: plan.slots has ", slots.ndim(),
          " axes, expected [num_ranks, slots per rank]");
  require(rows.ndim() == 2 && rows.dim(0) == slots.dim(0), "slot_ids: rows has shape ",
          to_string(rows.shape()), ", expected [", slots.dim(0), ", num_experts]");
  EvenExperts plan;
  plan.num_ranks = static_cast<std::int32_t>(slots.dim(0));
  plan.slots_per_rank = static_cast<std::int32_t>(slots.dim(1));
  plan.slots = int32s_from(slots, "slot_ids: plan.slots");
  plan.quotas = int64s(quotas);
  plan.local_rows = int64s(local_rows);
  plan.first_row = int64s(first_row);
  const Int64View counts(rows);
  const std::vector<std::int32_t> numbers = int32s_from(ids, "slot_ids: ids");
  const std::vector<std::int32_t> made =
      unlocked([&] { return slot_ids(plan, counts.span(), numbers, rank); });
  return int32_table(made, ids.shape());
}

using LoadArg = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::dict expert_placement_py(const LoadArg& loads, const std::vector<std::int32_t>& present,
                             std::int32_t num_ranks, std::int32_t slots_per_rank,
                             std::int32_t num_nodes, std::int32_t num_groups,
                             std::int64_t max_moves) {
  const ExpertPlacementOptions options{.num_ranks = num_ranks,
                                       .slots_per_rank = slots_per_rank,
                                       .num_nodes = num_nodes,
                                       .num_groups = num_groups,
                                       .present = present,
                                       .max_moves = max_moves};
  const auto num_layers = static_cast<std::int64_t>(loads.shape(0));
  const auto num_experts = static_cast<std::int32_t>(loads.shape(1));
  ExpertPlacement plan = unlocked([&] {
    return plan_expert_placement({loads.data(), loads.size()}, num_layers, num_experts, options);
  });
  const auto integers = [&](const std::vector<std::int32_t>& values) {
    return int32_table(values, {std::ssize(values)});
  };
  nb::dict fields;
  fields["slots"] = integers(plan.slots);
  fields["copies"] = integers(plan.copies);
  fields["rank_loads"] = std::move(plan.rank_loads);
  fields["moves"] = integers(plan.moves);
  return fields;
}

nb::list simulate_copies_py(const IndexArray& slots, std::int32_t num_experts,
                            const std::vector<ArrayArg>& home, std::int64_t row_bytes) {
  const std::vector<std::int32_t> experts = int32s_from(slots, "simulate_expert_copies: slots");
  const ExpertSlotTable table{static_cast<std::int32_t>(home.size()), num_experts, experts};
  std::vector<std::span<const std::byte>> views;
  for (const ArrayArg& of_rank : home) {
    views.emplace_back(static_cast<const std::byte*>(of_rank.data()), of_rank.nbytes());
  }
  const auto made = simulate_expert_copies(table, views, row_bytes);
  nb::list result;
  for (const auto& of_rank : made) {
    HostTensor bytes(DType::uint8, {std::ssize(of_rank)});
    std::ranges::copy(of_rank, bytes.bytes().begin());
    result.append(numpy_array(std::move(bytes)));
  }
  return result;
}

nb::list simulate_copy_gradients_py(const IndexArray& slots, std::int32_t num_experts,
                                    const std::vector<PayloadArg>& home,
                                    const std::vector<PayloadArg>& copies, std::string_view dtype,
                                    std::string_view sum_dtype) {
  const std::vector<std::int32_t> experts =
      int32s_from(slots, "simulate_expert_copy_gradients: slots");
  const ExpertSlotTable table{static_cast<std::int32_t>(home.size()), num_experts, experts};
  const auto home_views = views_of(home, dtype);
  const auto copy_views = views_of(copies, sum_dtype);
  return numpy_arrays(
      unlocked([&] { return simulate_expert_copy_gradients(table, home_views, copy_views); }));
}

void bind_expert_transfers(nb::module_& m) {
  m.def("simulate_expert_copies", simulate_copies_py, "slots"_a, "num_experts"_a, "home"_a,
        "row_bytes"_a);
  m.def("simulate_expert_copy_gradients", simulate_copy_gradients_py, "slots"_a, "num_experts"_a,
        "home"_a, "copies"_a, "dtype"_a, "sum_dtype"_a);
}

void bind_expert_balance(nb::module_& m) {
  m.def("plan_expert_placement", &expert_placement_py, "loads"_a, "present"_a, "num_ranks"_a,
        "slots_per_rank"_a, "num_nodes"_a, "num_groups"_a, "max_moves"_a);
  nb::class_<EvenExperts> even(m, "EvenExperts");
  add_table(even, "slots", &EvenExperts::slots);
  add_table(even, "quotas", &EvenExperts::quotas);
  add_table(even, "local_rows", &EvenExperts::local_rows);
  add_table(even, "first_row", &EvenExperts::first_row);
  add_table(even, "weights_out", &EvenExperts::weights_out);
  add_table(even, "weights_in", &EvenExperts::weights_in);
  even.def_ro("max_rows", &EvenExperts::max_rows);
  even.def_ro("mean_rows", &EvenExperts::mean_rows);
  even.def_ro("bound", &EvenExperts::bound);
  m.def("slot_ids", &slot_ids_py, "slots"_a, "quotas"_a, "local_rows"_a, "first_row"_a, "rows"_a,
        "ids"_a, "rank"_a);
  m.def("even_experts", &even_experts_py, "rows"_a, "spare_experts"_a, "present"_a, "min_rows"_a,
        "limit"_a, "alignment"_a, "num_nodes"_a, pure_call);
}

}  // namespace

void bind_moe(nb::module_& m) {
  nb::class_<EPConfig>(m, "EPConfig");
  nb::class_<EPDispatchOptions>(m, "EPDispatchOptions");
  nb::class_<ExpertDispatch>(m, "ExpertDispatch")
      .def("combine", simulate_combine_py, "outputs"_a, "biases"_a, "local_combine"_a,
           "weighted"_a);
  m.attr("ep_row_names") = tuple_of(detail::row_names);
  m.attr("payload_formats") = tuple_of(quantised_formats());
  m.def("ep_payload", payload_py, "payload"_a, "argument"_a, "hidden"_a);
  m.def("ep_config", config_py, "max_tokens"_a, "hidden"_a, "topk"_a, "num_experts"_a, "rank"_a,
        "world_size"_a, "local_world_size"_a, "token_dtype"_a, "weight_dtype"_a);
  m.def("ep_dispatch_options", dispatch_options_py, "config"_a, "dropped_id"_a.none(), "rows"_a,
        "expert_alignment"_a, "payload"_a, "spare_experts"_a = 0, "limit"_a = 1.0,
        "min_rows"_a = 0);
  m.def("simulate_expert_dispatch", simulate_dispatch_py, "config"_a, "options"_a, "tokens"_a,
        "token_dtype"_a, "ids"_a, "weights"_a, "scales"_a, "positions"_a.none(), "present"_a);
  m.def("grown_output_rows", grown_output_rows, "rows"_a, "largest"_a);
  m.def("quantize_rows", quantize_py, "rows"_a, "dtype"_a, "format"_a);
  bind_expert_calls(m);
  bind_expert_summary(m);
  bind_expert_balance(m);
  bind_expert_transfers(m);
}

}  // namespace waybill::python
