#include "input_checks.h"

#include <cstring>

#include "core/to_size.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

void check_entries(std::size_t entries, const EPConfig& config, const char* who, const char* name) {
  require(entries == to_size(config.world_size), who, ": ", name, " has ", entries,
          " entries, expected one for each of ", config.world_size, " ranks");
}

HostTensor copy_rows(const ConstTensorView& view) {
  HostTensor result(view.dtype, view.shape);
  const std::int64_t row_bytes = view.shape[1] * dtype_bytes(view.dtype);
  for (std::int64_t row = 0; row < view.shape[0] && row_bytes > 0; ++row) {
    std::memcpy(result.bytes().data() + row * row_bytes,
                view.data + row * view.strides[0] * dtype_bytes(view.dtype), row_bytes);
  }
  return result;
}

std::vector<std::int64_t> read_positions(const EPConfig& config, const EPDispatchOptions& options,
                                         const ConstTensorView& view, std::int64_t total_tokens,
                                         const char* who) {
  require(options.rows == EPRows::grouped && options.expert_alignment == 1, who,
          ": full_scatter_indices are for grouped rows without padding; got ",
          options.rows == EPRows::grouped ? "grouped" : "compact",
          " rows, expert_alignment = ", options.expert_alignment);
  require(view.dtype == DType::int32 || view.dtype == DType::int64, who,
          ": full_scatter_indices is ", view.dtype, ", expected int32 or int64");
  require(view.shape == Shape{total_tokens, config.topk}, who, ": full_scatter_indices has shape ",
          to_string(view.shape), ", expected [", total_tokens, ", ", config.topk,
          "]: the topk slots of all ranks");
  std::vector<std::int64_t> positions;
  for (std::int64_t t = 0; t < total_tokens; ++t) {
    for (std::int64_t k = 0; k < config.topk; ++k) {
      const std::byte* const place =
          view.data + (t * view.strides[0] + k * view.strides[1]) * dtype_bytes(view.dtype);
      positions.push_back(view.dtype == DType::int32
                              ? *reinterpret_cast<const std::int32_t*>(place)
                              : *reinterpret_cast<const std::int64_t*>(place));
    }
  }
  return positions;
}

}  // namespace

void check_matrix(const ConstTensorView& view, std::int64_t rows, std::int64_t columns, DType dtype,
                  const char* who, const char* name, std::size_t rank) {
  require(view.dtype == dtype, who, ": ", name, "[", rank, "] is ", view.dtype, ", expected ",
          dtype);
  require(view.shape == Shape{rows, columns}, who, ": ", name, "[", rank, "] has shape ",
          to_string(view.shape), ", expected [", rows, ", ", columns, "]");
  require(rows == 0 || columns <= 1 || view.strides[1] == 1, who, ": ", name, "[", rank,
          "]: the elements of a row are ", view.strides[1], " apart, expected 1");
}

CheckedInputs check_inputs(const EPConfig& config, const EPDispatchOptions& options,
                           const ExpertInputs& inputs, const char* who) {
  config.check(who);
  options.check(config, who);
  check_entries(inputs.tokens.size(), config, who, "tokens");
  check_entries(inputs.exp_indices.size(), config, who, "exp_indices");
  if (!inputs.weights.empty()) check_entries(inputs.weights.size(), config, who, "weights");
  const bool scaled = options.payload == EPPayload::scaled;
  if (scaled) check_entries(inputs.scales.size(), config, who, "scales");
  require(scaled || inputs.scales.empty(), who,
          ": scales are given, expected none: the payload is not float8_e4m3fn with scales");

  CheckedInputs checked;
  std::int64_t total_tokens = 0;
  for (std::size_t r = 0; r < to_size(config.world_size); ++r) {
    const ConstTensorView& tokens = inputs.tokens[r];
    require(tokens.ndim() == 2, who, ": tokens[", r, "] has shape ", to_string(tokens.shape),
            ", expected [num_tokens, ", config.hidden, "]");
    const std::int64_t count = tokens.shape[0];
    check_matrix(tokens, count, config.hidden, scaled ? DType::float8_e4m3fn : config.token_dtype,
                 who, "tokens", r);
    require(count <= config.max_tokens, who, ": tokens[", r, "] has ", count,
            " tokens, expected at most max_tokens = ", config.max_tokens);
    require(inputs.exp_indices[r].shape == Shape{count, config.topk}, who, ": exp_indices[", r,
            "] has shape ", to_string(inputs.exp_indices[r].shape), ", expected [", count, ", ",
            config.topk, "]");
    checked.ids.push_back(
        read_expert_ids(config, options, inputs.exp_indices[r], concat(who, ": rank ", r).c_str()));
    if (!inputs.weights.empty()) {
      check_matrix(inputs.weights[r], count, config.topk, config.weight_dtype, who, "weights", r);
      checked.weights.push_back(copy_rows(inputs.weights[r]));
    }
    if (scaled) {
      check_matrix(inputs.scales[r], count, num_scales(config, options), DType::float32, who,
                   "scales", r);
    }
    total_tokens += count;
  }
  if (inputs.full_scatter_indices) {
    checked.positions =
        read_positions(config, options, *inputs.full_scatter_indices, total_tokens, who);
  }
  return checked;
}

void check_ids(const char* who, const EPConfig& config,
               std::span<const std::vector<std::int32_t>> ids) {
  require(std::ssize(ids) == config.world_size, who, ": ids has ", ids.size(),
          " entries, expected one per rank: ", config.world_size);
  for (std::size_t r = 0; r < ids.size(); ++r) {
    const std::int64_t size = std::ssize(ids[r]);
    require(size % config.topk == 0 && size / config.topk <= config.max_tokens, who, ": ids[", r,
            "] has ", size, " entries, expected topk = ", config.topk, " for each of at most ",
            config.max_tokens, " tokens");
    for (std::size_t i = 0; i < ids[r].size(); ++i) {
      require(0 <= ids[r][i] && ids[r][i] <= config.num_experts, who, ": ids[", r, "]: token ",
              i / to_size(config.topk), ", topk slot ", i % to_size(config.topk), " has expert ",
              ids[r][i], ", expected 0..", config.num_experts);
    }
  }
}

}  // namespace waybill::detail
