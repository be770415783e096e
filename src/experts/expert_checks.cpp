#include "expert_checks.h"

#include <utility>

#include "experts/expert_executor.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

template <class View>
void check_view(const char* who, const char* name, const View& view, DType dtype,
                const Shape& shape) {
  require(view.dtype == dtype, who, ": ", name, " is ", view.dtype, ", expected ", dtype);
  require(view.shape == shape, who, ": ", name, " has shape ", to_string(view.shape), ", expected ",
          to_string(shape));
  const std::int64_t elements = num_elements(view.shape, who);
  require(elements == 0 || view.strides == View::contiguous_strides(view.shape), who, ": ", name,
          " has strides ", to_string(view.strides), ", expected a contiguous tensor");
  require(elements == 0 || view.data != nullptr, who, ": ", name, " is null");
}

void check_positions(const EPConfig& config, const EPDispatchOptions& options,
                     const ConstTensorView& positions, std::int64_t own_tokens) {
  constexpr const char* who = "dispatch";
  require(options.rows == EPRows::grouped && options.expert_alignment == 1, who,
          ": full_scatter_indices are for grouped rows without padding");
  require(positions.dtype == DType::int32 || positions.dtype == DType::int64, who,
          ": full_scatter_indices is ", positions.dtype, ", expected int32 or int64");
  require(positions.ndim() == 2 && positions.shape[1] == config.topk, who,
          ": full_scatter_indices has shape ", to_string(positions.shape), ", expected [tokens of ",
          "all ranks, ", config.topk, "]");
  // The sum over ranks is known later; an empty table must not count as none till then.
  require(positions.shape[0] >= own_tokens, who, ": full_scatter_indices has ", positions.shape[0],
          " tokens, expected those of all ranks, and this one has ", own_tokens);
  require(positions.shape[0] <= config.world_size * config.max_tokens, who,
          ": full_scatter_indices has ", positions.shape[0],
          " tokens, expected those of all ranks, at most ", config.world_size, " * ",
          config.max_tokens);
  check_view(who, "full_scatter_indices", positions, positions.dtype, positions.shape);
}

}  // namespace

void check_dtypes_of_engine(const World& world, const EPConfig& config, const char* who) {
  if (dynamic_cast<ExpertExecutorFactory*>(&world.executor()) == nullptr) return;
  for (const auto& [name, dtype] :
       {std::pair{"token_dtype", config.token_dtype}, {"weight_dtype", config.weight_dtype}}) {
    if (dtype != DType::float64) continue;
    throw Unsupported(concat(who, ": ", name, " = float64 on GPUs, expected bfloat16, float16 or ",
                             "float32: float64 is for ranks in host memory"));
  }
}

void check_dispatch_input(const EPConfig& config, const EPDispatchOptions& options,
                          const ExpertDispatchInput& input, bool ids_matter) {
  constexpr const char* who = "dispatch";
  const bool scaled = options.payload == EPPayload::scaled;
  require(input.tokens.ndim() == 2, who, ": input has shape ", to_string(input.tokens.shape),
          ", expected [num_tokens, ", config.hidden, "]");
  const std::int64_t tokens = input.tokens.shape[0];
  check_view(who, "input", input.tokens, scaled ? DType::float8_e4m3fn : config.token_dtype,
             {tokens, config.hidden});
  require(tokens <= config.max_tokens, who, ": input has ", tokens,
          " tokens, expected at most max_tokens = ", config.max_tokens);
  if (ids_matter) {
    require(input.ids.dtype == DType::int32 || input.ids.dtype == DType::int64, who,
            ": exp_indices is ", input.ids.dtype, ", expected int32 or int64");
    check_view(who, "exp_indices", input.ids, input.ids.dtype, {tokens, config.topk});
    if (is_given(input.full_scatter_indices)) {
      check_positions(config, options, input.full_scatter_indices, tokens);
    }
  }
  if (is_given(input.weights)) {
    check_view(who, "weight", input.weights, config.weight_dtype, {tokens, config.topk});
  }
  if (scaled) {
    check_view(who, "scales", input.scales, DType::float32, {tokens, num_scales(config, options)});
  } else {
    require(!is_given(input.scales), who,
            ": scales are given, expected none: the payload has none");
  }
}

void check_combine_input(const EPConfig& config, const ExpertCombineInput& input,
                         std::int64_t num_rows, std::int64_t num_tokens) {
  constexpr const char* who = "combine";
  if (num_rows < 0 && input.rows.ndim() == 2) num_rows = input.rows.shape[0];
  check_view(who, "input", input.rows, config.token_dtype, {num_rows, config.hidden});
  check_view(who, "output", input.output, config.token_dtype, {num_tokens, config.hidden});
  require(input.biases.size() <= 2, who, ": ", input.biases.size(), " biases, expected at most 2");
  for (const ConstTensorView& bias : input.biases) {
    check_view(who, "bias", bias, config.token_dtype, {num_tokens, config.hidden});
  }
}

void check_gradient_input(const EPConfig& config, const ExpertGradientInput& input) {
  constexpr const char* who = "weigh_gradients";
  const DType dtype = config.token_dtype;
  require(input.gradients.ndim() == 2, who, ": gradients has shape ",
          to_string(input.gradients.shape), ", expected [num_rows, ", config.hidden, "]");
  const std::int64_t rows = input.gradients.shape[0];
  const Shape shape{rows, config.hidden};
  check_view(who, "gradients", input.gradients, dtype, shape);
  if (is_given(input.row_gradients)) {
    check_view(who, "weights", input.weights, config.weight_dtype, {rows});
    check_view(who, "row_gradients", input.row_gradients, dtype, shape);
  }
  require(is_given(input.rows) == is_given(input.weight_gradients), who,
          ": one of rows and weight_gradients is given, expected both or none");
  if (!is_given(input.rows)) return;
  const bool wide = config.weight_dtype == DType::float64;
  check_view(who, "rows", input.rows, dtype, shape);
  check_view(who, "weight_gradients", input.weight_gradients,
             wide ? DType::float64 : DType::float32, {rows});
}

void check_copied_rows(const EPConfig& config, const ConstTensorView& from, const TensorView& to) {
  constexpr const char* who = "copy_rows";
  require(from.ndim() == 2, who, ": rows have shape ", to_string(from.shape),
          ", expected [num_rows, ", config.hidden, "]");
  const Shape shape{from.shape[0], config.hidden};
  check_view(who, "rows", from, config.token_dtype, shape);
  check_view(who, "the copy", to, config.token_dtype, shape);
}

}  // namespace waybill::detail
