#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/float_convert.h"
#include "core/to_size.h"
#include "waybill/core/random.h"
#include "waybill/moe/quantize.h"
#include "waybill/moe/simulate.h"

namespace waybill::test {

/// Element `idx` of a tensor of float32, bfloat16 or float16.
inline float float_at(const HostTensor& tensor, std::int64_t idx) {
  if (tensor.dtype() == DType::float32) return tensor.as<float>()[detail::to_size(idx)];
  const std::uint16_t bits = tensor.as<std::uint16_t>()[detail::to_size(idx)];
  return tensor.dtype() == DType::bfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

/// The same, also of float64.
inline double number_at(const HostTensor& tensor, std::int64_t idx) {
  if (tensor.dtype() == DType::float64) return tensor.as<double>()[detail::to_size(idx)];
  return float_at(tensor, idx);
}

/// Stores a value, rounded to the tensor's dtype; in float64 with more digits than float32 has.
inline void set_float(HostTensor& tensor, std::int64_t idx, float value) {
  if (tensor.dtype() == DType::float64) {
    tensor.as<double>()[detail::to_size(idx)] = static_cast<double>(value) / 3;
  } else if (tensor.dtype() == DType::float32) {
    tensor.as<float>()[detail::to_size(idx)] = value;
  } else {
    tensor.as<std::uint16_t>()[detail::to_size(idx)] =
        tensor.dtype() == DType::bfloat16 ? float_to_bfloat16(value) : float_to_float16(value);
  }
}

inline std::vector<ConstTensorView> views_of(const std::vector<HostTensor>& tensors) {
  std::vector<ConstTensorView> views;
  views.reserve(tensors.size());
  for (const HostTensor& tensor : tensors) views.push_back(tensor.view());
  return views;
}

/// What all ranks bring to one dispatch, owned.
struct ExpertCase {
  EPConfig config;
  std::vector<HostTensor> tokens;
  std::vector<HostTensor> ids;
  std::vector<HostTensor> weights;
  std::vector<HostTensor> scales;
  std::optional<HostTensor> positions;

  [[nodiscard]] ExpertDispatch dispatch(const EPDispatchOptions& options = {}) const {
    const auto token_views = views_of(tokens);
    const auto id_views = views_of(ids);
    const auto weight_views = views_of(weights);
    const auto scale_views = views_of(scales);
    ExpertInputs inputs{token_views, id_views, weight_views, scale_views, std::nullopt};
    if (positions) inputs.full_scatter_indices = positions->view();
    return simulate_expert_dispatch(config, inputs, options);
  }
};

/// The same with tokens as float8 elements and scales.
inline ExpertCase quantized_case(ExpertCase sample) {
  using detail::to_size;
  const std::int64_t hidden = sample.config.hidden;
  const std::int64_t groups = hidden / scale_group;
  for (HostTensor& tokens : sample.tokens) {
    const std::int64_t count = tokens.shape()[0];
    HostTensor elements(DType::float8_e4m3fn, {count, hidden});
    HostTensor scales(DType::float32, {count, groups});
    for (std::int64_t t = 0; t < count; ++t) {
      const auto row_bytes = to_size(hidden * dtype_bytes(tokens.dtype()));
      quantize_row(tokens.bytes().data() + to_size(t) * row_bytes, tokens.dtype(),
                   elements.as<std::uint8_t>().subspan(to_size(t * hidden), to_size(hidden)),
                   scales.as<float>().subspan(to_size(t * groups), to_size(groups)));
    }
    tokens = std::move(elements);
    sample.scales.push_back(std::move(scales));
  }
  return sample;
}

/// How ids are drawn.
enum class Draw { distinct, repeats, one_expert, all_dropped };

struct RandomCaseOptions {
  Draw draw = Draw::repeats;
  double drop = 0.1;
  DType id_dtype = DType::int32;
  std::int64_t tokens = -1;  ///< of each rank; -1: any number up to max_tokens
};

inline std::int64_t random_id(Random& random, const EPConfig& config,
                              const RandomCaseOptions& options,
                              std::span<const std::int32_t> permutation, std::int64_t k) {
  if (options.draw == Draw::all_dropped) return config.num_experts;
  if (random.uniform_double() < options.drop) return config.num_experts;
  if (options.draw == Draw::one_expert) return config.num_experts - 1;
  if (options.draw == Draw::repeats || permutation.empty()) return random.below(config.num_experts);
  return permutation[detail::to_size(k)];
}

/// Random tokens and weights, ids as drawn.
inline ExpertCase random_case(const EPConfig& config, Random& random,
                              const RandomCaseOptions& options = {}) {
  ExpertCase result;
  result.config = config;
  for (std::int32_t r = 0; r < config.world_size; ++r) {
    const std::int64_t count =
        options.tokens >= 0 ? options.tokens : random.below(config.max_tokens + 1);
    HostTensor tokens(config.token_dtype, {count, config.hidden});
    HostTensor ids(options.id_dtype, {count, config.topk});
    HostTensor weights(config.weight_dtype, {count, config.topk});
    for (std::int64_t i = 0; i < count * config.hidden; ++i) {
      set_float(tokens, i, random.uniform_float() * 16 - 8);
    }
    for (std::int64_t t = 0; t < count; ++t) {
      std::vector<std::int32_t> distinct;
      if (options.draw == Draw::distinct && config.topk <= config.num_experts) {
        distinct = random.permutation(config.num_experts, config.topk);
      }
      for (std::int64_t k = 0; k < config.topk; ++k) {
        const std::int64_t id = random_id(random, config, options, distinct, k);
        const std::int64_t i = t * config.topk + k;
        if (options.id_dtype == DType::int32) {
          ids.as<std::int32_t>()[detail::to_size(i)] = static_cast<std::int32_t>(id);
        } else {
          ids.as<std::int64_t>()[detail::to_size(i)] = id;
        }
        set_float(weights, i, random.uniform_float());
      }
    }
    result.tokens.push_back(std::move(tokens));
    result.ids.push_back(std::move(ids));
    result.weights.push_back(std::move(weights));
  }
  return result;
}

}  // namespace waybill::test
