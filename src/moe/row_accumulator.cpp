#include "moe/row_accumulator.h"

#include <algorithm>
#include <variant>
#include <vector>

#include "core/number.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

/// Calls visit(i, element as float32; as float64 where that is the dtype) for each element of a
/// row.
template <class Visit>
void visit_row(const std::byte* row, DType dtype, std::size_t count, Visit&& visit) {
  detail::for_number(dtype, [&]<class Number>(Number) {
    const auto* const elements = reinterpret_cast<const typename Number::Stored*>(row);
    for (std::size_t i = 0; i < count; ++i) visit(i, Number::load(elements[i]));
  });
}

/// Adds term(element as the type of the sums) for each element of a row.
template <class Sums, class Term>
void add_terms(const std::byte* row, DType dtype, Sums& all, Term&& term) {
  std::visit(
      [&]<class Sum>(std::vector<Sum>& sums) {
        visit_row(row, dtype, sums.size(),
                  [&](std::size_t i, auto value) { sums[i] += term(static_cast<Sum>(value)); });
      },
      all);
}

}  // namespace

RowAccumulator::RowAccumulator(std::int64_t hidden, DType dtype) : dtype_(dtype) {
  require(detail::is_summed(dtype), "RowAccumulator: dtype = ", dtype,
          ", expected float32, float16, bfloat16 or float64");
  if (dtype == DType::float64) {
    sums_.emplace<std::vector<double>>(hidden);
  } else {
    sums_.emplace<std::vector<float>>(hidden);
  }
}

void RowAccumulator::reset() {
  std::visit([](auto& sums) { std::ranges::fill(sums, 0); }, sums_);
}

void RowAccumulator::add(const std::byte* row) {
  add_terms(row, dtype_, sums_, [](auto value) { return value; });
}

void RowAccumulator::add_weighted(const std::byte* row, double weight) {
  add_terms(row, dtype_, sums_,
            [weight](auto value) { return value * static_cast<decltype(value)>(weight); });
}

void RowAccumulator::add_rounded(const RowAccumulator& other) {
  detail::for_number(other.dtype_, [&]<class Number>(Number) {
    const auto& more = std::get<std::vector<typename Number::Sum>>(other.sums_);
    std::visit(
        [&]<class Sum>(std::vector<Sum>& sums) {
          for (std::size_t i = 0; i < sums.size(); ++i)
            sums[i] += static_cast<Sum>(Number::load(Number::round(more[i])));
        },
        sums_);
  });
}

void RowAccumulator::write(std::byte* row) const {
  detail::for_number(dtype_, [&]<class Number>(Number) {
    const auto& sums = std::get<std::vector<typename Number::Sum>>(sums_);
    std::ranges::transform(sums, reinterpret_cast<typename Number::Stored*>(row), Number::round);
  });
}

double weight_at(const std::byte* weights, std::int64_t idx, DType dtype) {
  double weight = 0;
  visit_row(weights + idx * dtype_bytes(dtype), dtype, 1,
            [&weight](std::size_t, auto value) { weight = value; });
  return weight;
}

}  // namespace waybill
