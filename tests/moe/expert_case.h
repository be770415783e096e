#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/number.h"
#include "core/to_size.h"
#include "waybill/core/random.h"
#include "waybill/moe/payload_format.h"
#include "waybill/moe/simulate.h"

namespace waybill::test {

/// Element `idx` of a tensor of float32, bfloat16 or float16.
inline float float_at(const HostTensor& tensor, std::int64_t idx) {
  if (tensor.dtype() == DType::float32) return tensor.as<float>()[idx];
  const std::uint16_t bits = tensor.as<std::uint16_t>()[idx];
  return tensor.dtype() == DType::bfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

/// The same, also of float64.
inline double number_at(const HostTensor& tensor, std::int64_t idx) {
  if (tensor.dtype() == DType::float64) return tensor.as<double>()[idx];
  return float_at(tensor, idx);
}

/// Stores a value, rounded to the tensor's dtype; in float64 with more digits than float32 has.
inline void set_float(HostTensor& tensor, std::int64_t idx, float value) {
  if (tensor.dtype() == DType::float64) {
    tensor.as<double>()[idx] = static_cast<double>(value) / 3;
  } else if (tensor.dtype() == DType::float32) {
    tensor.as<float>()[idx] = value;
  } else {
    tensor.as<std::uint16_t>()[idx] =
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

  [[nodiscard]] ExpertDispatch dispatch(const EPDispatchOptions& options = {},
                                        std::span<const std::int32_t> present = {}) const {
    const auto token_views = views_of(tokens);
    const auto id_views = views_of(ids);
    const auto weight_views = views_of(weights);
    const auto scale_views = views_of(scales);
    ExpertInputs inputs{token_views, id_views, weight_views, scale_views, std::nullopt};
    if (positions) inputs.full_scatter_indices = positions->view();
    inputs.present = present;
    return simulate_expert_dispatch(config, inputs, options);
  }
};

/// The experts in the spare slots of a dispatch, as ExpertInputs::present.
inline std::vector<std::int32_t> copies_in(const ExpertDispatch& dispatch) {
  const EvenExperts& plan = dispatch.slots->plan;
  std::vector<std::int32_t> copies;
  for (std::int64_t i = 0; i < std::ssize(plan.slots); ++i) {
    if (i % plan.slots_per_rank >= plan.slots_per_rank - dispatch.options.spare_experts)
      copies.push_back(plan.slots[i]);
  }
  return copies;
}

/// The same with tokens as elements and scales of a format.
inline ExpertCase quantized_case(ExpertCase sample,
                                 const PayloadFormat& format = EPPayload::scaled.format()) {
  using detail::to_size;
  const std::int64_t hidden = sample.config.hidden;
  const EPPayload payload(format, true);
  const std::int64_t columns = payload.row_items(hidden);
  const std::int64_t scale_bytes = payload.scale_bytes(hidden);
  for (HostTensor& tokens : sample.tokens) {
    const std::int64_t count = tokens.shape()[0];
    HostTensor elements(payload.row_dtype(tokens.dtype()), {count, columns});
    HostTensor scales(payload.scale_dtype(), {count, payload.scale_items(hidden)});
    for (std::int64_t t = 0; t < count; ++t) {
      const std::size_t row_bytes = hidden * dtype_bytes(tokens.dtype());
      quantize_row(format, tokens.bytes().data() + to_size(t) * row_bytes, tokens.dtype(),
                   {reinterpret_cast<std::uint8_t*>(elements.bytes().data()) + t * columns,
                    to_size(columns)},
                   {reinterpret_cast<std::uint8_t*>(scales.bytes().data()) + t * scale_bytes,
                    to_size(scale_bytes)});
    }
    tokens = std::move(elements);
    sample.scales.push_back(std::move(scales));
  }
  return sample;
}

/// How ids are drawn.
enum class Draw {
  distinct,
  repeats,           ///< any expert, also twice
  same_expert,       ///< one expert in all topk slots of a token
  one_expert,        ///< the last one, by all
  unused_expert,     ///< any but one expert, which nobody chooses
  one_rank_is_idle,  ///< any but those of one rank
  all_dropped,
  any,  ///< repeats, or one of those above, each with the same probability
};

/// How many tokens ranks have, beside any number up to max_tokens.
enum class Counts {
  rank_without_tokens,  ///< one rank has none
  one_rank_has_all,     ///< all but one have none
  one_token,            ///< in all
  exactly_max_tokens,   ///< on each rank
  none_at_all,
  any_number,
};

struct RandomCaseOptions {
  Draw draw = Draw::any;
  /// Without: any number of tokens, and the ids of Draw::any are Draw::repeats. For tests of a
  /// single case, which might be drawn without a row.
  bool edges = true;
  double drop = 0.1;
  DType id_dtype = DType::int32;
  /// Tokens of each rank. -1: any number, and for every second case one of Counts. With a number
  /// the ids of Draw::any are Draw::repeats: who counts tokens looks for their rows.
  std::int64_t tokens = -1;
};

/// Tokens of each rank, [W].
inline std::vector<std::int64_t> random_counts(const EPConfig& config, Random& random,
                                               const RandomCaseOptions& options) {
  const std::size_t world = config.world_size;
  if (options.tokens >= 0) return std::vector<std::int64_t>(world, options.tokens);
  const auto edges = static_cast<std::int64_t>(Counts::any_number);
  const auto how = !options.edges || random.below(2) == 0
                       ? Counts::any_number
                       : static_cast<Counts>(random.below(edges));
  const std::size_t chosen = random.below(config.world_size);
  std::vector<std::int64_t> counts;
  for (std::size_t r = 0; r < world; ++r) {
    const std::int64_t any = random.below(config.max_tokens + 1);
    const std::int64_t some =
        std::max<std::int64_t>(any, std::min<std::int64_t>(1, config.max_tokens));
    switch (how) {
      case Counts::rank_without_tokens:
        counts.push_back(r == chosen ? 0 : some);
        break;
      case Counts::one_rank_has_all:
        counts.push_back(r == chosen ? some : 0);
        break;
      case Counts::one_token:
        counts.push_back(r == chosen ? std::min<std::int64_t>(1, config.max_tokens) : 0);
        break;
      case Counts::exactly_max_tokens:
        counts.push_back(config.max_tokens);
        break;
      case Counts::none_at_all:
        counts.push_back(0);
        break;
      case Counts::any_number:
        counts.push_back(any);
        break;
    }
  }
  return counts;
}

/// Draws the ids of a case, token by token.
class IdDraws {
 public:
  IdDraws(const EPConfig& config, Random& random, const RandomCaseOptions& options)
      : config_(config), random_(random), drop_(options.drop), draw_(options.draw) {
    const auto edges = static_cast<std::int64_t>(Draw::any);
    if (draw_ == Draw::any) {
      const bool edge = options.edges && options.tokens < 0 && random.below(2) == 0;
      draw_ = edge ? static_cast<Draw>(random.below(edges)) : Draw::repeats;
    }
    if (draw_ == Draw::distinct && config.topk > config.num_experts) draw_ = Draw::repeats;
    unused_ = static_cast<std::int32_t>(random.below(config.num_experts));
  }

  void begin_token() {
    if (draw_ == Draw::distinct) distinct_ = random_.permutation(config_.num_experts, config_.topk);
    if (draw_ == Draw::same_expert) same_ = random_.below(config_.num_experts);
  }

  /// Of topk slot `k` of the token begun last.
  [[nodiscard]] std::int64_t id(std::int64_t k) {
    const std::int64_t dropped = config_.num_experts;
    if (draw_ == Draw::all_dropped || random_.uniform_double() < drop_) return dropped;
    switch (draw_) {
      case Draw::distinct:
        return distinct_[k];
      case Draw::same_expert:
        return same_;
      case Draw::one_expert:
        return dropped - 1;
      case Draw::unused_expert:
        return used(unused_, 1);
      case Draw::one_rank_is_idle: {
        const std::int64_t per_rank = config_.num_experts / config_.world_size;
        return used(unused_ / per_rank * per_rank, per_rank);
      }
      default:
        return random_.below(config_.num_experts);
    }
  }

 private:
  /// An expert outside begin..begin + count - 1; dropped where there is none.
  std::int64_t used(std::int64_t begin, std::int64_t count) {
    const std::int64_t others = config_.num_experts - count;
    if (others == 0) return config_.num_experts;
    const std::int64_t id = random_.below(others);
    return id < begin ? id : id + count;
  }

  const EPConfig& config_;
  Random& random_;
  double drop_;
  Draw draw_;
  std::int64_t unused_ = 0;
  std::int64_t same_ = 0;
  std::vector<std::int32_t> distinct_;
};

/// Random tokens and weights, ids as drawn.
inline ExpertCase random_case(const EPConfig& config, Random& random,
                              const RandomCaseOptions& options = {}) {
  ExpertCase result;
  result.config = config;
  IdDraws draws(config, random, options);
  for (const std::int64_t count : random_counts(config, random, options)) {
    HostTensor tokens(config.token_dtype, {count, config.hidden});
    HostTensor ids(options.id_dtype, {count, config.topk});
    HostTensor weights(config.weight_dtype, {count, config.topk});
    for (std::int64_t i = 0; i < count * config.hidden; ++i) {
      set_float(tokens, i, random.uniform_float() * 16 - 8);
    }
    for (std::int64_t t = 0; t < count; ++t) {
      draws.begin_token();
      for (std::int64_t k = 0; k < config.topk; ++k) {
        const std::int64_t id = draws.id(k);
        const std::int64_t i = t * config.topk + k;
        if (options.id_dtype == DType::int32) {
          ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(id);
        } else {
          ids.as<std::int64_t>()[i] = id;
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
