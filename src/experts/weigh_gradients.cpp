#include "weigh_gradients.h"

#include <array>

#include "core/number.h"
#include "moe/row_accumulator.h"

namespace waybill::detail {
namespace {

/// In the order that ExpertGradientInput says.
template <class Number>
typename Number::Sum dot_product(const typename Number::Stored* a, const typename Number::Stored* b,
                                 std::int64_t count) {
  std::array<typename Number::Sum, gradient_partial_sums> sums{};
  for (std::int64_t i = 0; i < count; ++i) {
    sums[i % gradient_partial_sums] += Number::load(a[i]) * Number::load(b[i]);
  }
  for (std::size_t apart = 1; apart < sums.size(); apart *= 2) {
    for (std::size_t i = 0; i < sums.size(); i += 2 * apart) sums[i] += sums[i + apart];
  }
  return sums[0];
}

template <class Number>
void weigh(const ExpertGradientInput& input, std::int64_t num_rows) {
  using Stored = typename Number::Stored;
  using Sum = typename Number::Sum;
  const std::int64_t hidden = input.gradients.shape[1];
  const auto* const gradients = reinterpret_cast<const Stored*>(input.gradients.data);
  const auto* const rows = reinterpret_cast<const Stored*>(input.rows.data);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const Stored* const gradient = gradients + row * hidden;
    if (is_given(input.rows)) {
      const Sum sum = dot_product<Number>(rows + row * hidden, gradient, hidden);
      if (input.weight_gradients.dtype == DType::float64) {
        reinterpret_cast<double*>(input.weight_gradients.data)[row] = sum;
      } else {
        reinterpret_cast<float*>(input.weight_gradients.data)[row] = static_cast<float>(sum);
      }
    }
    if (!is_given(input.row_gradients)) continue;
    const auto weight = static_cast<Sum>(weight_at(input.weights.data, row, input.weights.dtype));
    Stored* const to = reinterpret_cast<Stored*>(input.row_gradients.data) + row * hidden;
    for (std::int64_t i = 0; i < hidden; ++i) {
      to[i] = Number::round(weight * Number::load(gradient[i]));
    }
  }
}

}  // namespace

void weigh_gradients(const ExpertGradientInput& input, std::int64_t num_rows) {
  (void)for_number(input.gradients.dtype,
                   [&]<class Number>(Number /*is*/) { weigh<Number>(input, num_rows); });
}

}  // namespace waybill::detail
