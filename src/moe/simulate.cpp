#include "waybill/moe/simulate.h"

#include <cstring>

#include "core/to_size.h"
#include "input_checks.h"
#include "layout_desc.h"
#include "waybill/core/error.h"
#include "waybill/moe/quantize.h"

namespace waybill {

using detail::to_size;

namespace {

constexpr const char* in_dispatch = "simulate_expert_dispatch";

void place_all(ExpertDispatch& dispatch, const detail::CheckedInputs& inputs) {
  std::vector<std::int32_t> counts;
  for (const auto& ids : dispatch.ids) {
    const auto of_rank = count_topk_slots(dispatch.config, ids);
    counts.insert(counts.end(), of_rank.begin(), of_rank.end());
  }
  dispatch.rows = locate_rows(dispatch.config, dispatch.options, counts);
  std::size_t first = 0;
  for (std::int32_t src = 0; src < dispatch.config.world_size; ++src) {
    const auto& ids = dispatch.ids[src];
    dispatch.dst_row.push_back(
        inputs.positions.empty()
            ? place_topk_slots(dispatch.config, dispatch.options, dispatch.rows, src, ids)
            : place_by_scatter_indices(dispatch.config, dispatch.rows, src, ids,
                                       std::span(inputs.positions).subspan(first, ids.size()),
                                       in_dispatch));
    first += ids.size();
  }
}

void allocate_outputs(ExpertDispatch& dispatch) {
  const EPConfig& config = dispatch.config;
  const bool compact = dispatch.options.rows == EPRows::compact;
  for (std::size_t r = 0; r < to_size(config.world_size); ++r) {
    const std::int64_t rows = dispatch.rows.num_recv_rows[r];
    dispatch.recv_tokens.emplace_back(payload_dtype(config, dispatch.options),
                                      Shape{rows, config.hidden});
    if (const std::int64_t scales = num_scales(config, dispatch.options); scales > 0) {
      dispatch.recv_scales.emplace_back(DType::float32, Shape{rows, scales});
    }
    if (!dispatch.source_weights.empty()) {
      dispatch.recv_weights.emplace_back(config.weight_dtype,
                                         compact ? Shape{rows, config.topk} : Shape{rows});
    }
    dispatch.recv_origin.push_back(IndexArray::full({rows, 3}, -1).to(DType::int32, "recv_origin"));
  }
}

/// What a token is on its way: its bytes and its scales.
struct Payload {
  std::vector<std::byte> row;
  std::vector<float> scales;
};

void load_payload(const ExpertDispatch& dispatch, const ExpertInputs& inputs, std::size_t src,
                  std::int64_t token, Payload& payload) {
  const ConstTensorView& tokens = inputs.tokens[src];
  const std::byte* const row = tokens.data + token * tokens.strides[0] * dtype_bytes(tokens.dtype);
  if (dispatch.options.payload == EPPayload::quantized) {
    auto* const elements = reinterpret_cast<std::uint8_t*>(payload.row.data());
    quantize_row(row, tokens.dtype, {elements, payload.row.size()}, payload.scales);
    return;
  }
  std::memcpy(payload.row.data(), row, payload.row.size());
  if (dispatch.options.payload != EPPayload::scaled) return;
  const ConstTensorView& scales = inputs.scales[src];
  std::memcpy(payload.scales.data(),
              scales.data + token * scales.strides[0] * dtype_bytes(DType::float32),
              payload.scales.size() * sizeof(float));
}

/// Writes one topk slot of a token where it goes. @return false when another row is there already
bool deliver(ExpertDispatch& dispatch, std::size_t src, std::int64_t token, std::int64_t topk_slot,
             const Payload& payload) {
  const EPConfig& config = dispatch.config;
  const std::size_t entry = token * config.topk + topk_slot;
  const std::int32_t row = dispatch.dst_row[src][entry];
  if (row < 0) return true;
  const std::size_t dst = config.rank_of_expert(dispatch.ids[src][entry]);
  const bool compact = dispatch.options.rows == EPRows::compact;
  if (!dispatch.source_weights.empty()) {
    const std::int64_t bytes = dtype_bytes(config.weight_dtype);
    const std::int64_t place = compact ? std::int64_t{row} * config.topk + topk_slot : row;
    std::memcpy(dispatch.recv_weights[dst].bytes().data() + place * bytes,
                dispatch.source_weights[src].bytes().data() + bytes * entry, bytes);
  }
  auto* const origin =
      static_cast<std::int32_t*>(dispatch.recv_origin[dst].data()) + std::int64_t{row} * 3;
  if (origin[0] >= 0) return compact;
  origin[0] = static_cast<std::int32_t>(src);
  origin[1] = static_cast<std::int32_t>(token);
  origin[2] = static_cast<std::int32_t>(topk_slot);
  std::memcpy(dispatch.recv_tokens[dst].bytes().data() + row * payload.row.size(),
              payload.row.data(), payload.row.size());
  if (payload.scales.empty()) return true;
  std::ranges::copy(payload.scales, dispatch.recv_scales[dst].as<float>().begin() +
                                        row * static_cast<std::int64_t>(payload.scales.size()));
  return true;
}

}  // namespace

ExpertDispatch simulate_expert_dispatch(const EPConfig& config, const ExpertInputs& inputs,
                                        const EPDispatchOptions& options) {
  detail::CheckedInputs checked = detail::check_inputs(config, options, inputs, in_dispatch);
  ExpertDispatch dispatch;
  dispatch.config = config;
  dispatch.options = options;
  dispatch.ids = std::move(checked.ids);
  dispatch.source_weights = std::move(checked.weights);
  place_all(dispatch, checked);
  allocate_outputs(dispatch);

  Payload payload;
  payload.row.resize(payload_row_bytes(config, options));
  payload.scales.resize(num_scales(config, options));
  for (std::size_t src = 0; src < to_size(config.world_size); ++src) {
    for (std::int64_t token = 0; token < inputs.tokens[src].shape[0]; ++token) {
      load_payload(dispatch, inputs, src, token, payload);
      for (std::int64_t topk_slot = 0; topk_slot < config.topk; ++topk_slot) {
        require(deliver(dispatch, src, token, topk_slot, payload), in_dispatch,
                ": full_scatter_indices of rank ", src, ", token ", token, ", topk slot ",
                topk_slot, " is a position that another topk slot has already");
      }
    }
  }
  detail::fill_layouts(dispatch, !checked.positions.empty());
  detail::fill_traffic(dispatch);
  return dispatch;
}

}  // namespace waybill
