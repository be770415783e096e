#include "row_sum.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "waybill/core/at.h"
#include "waybill/core/float_convert.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t block_elements = 512;

template <class Stored, class Sum>
Sum widen(Stored value, DType from) {
  if constexpr (sizeof(Stored) == 2) {
    return from == DType::bfloat16 ? bfloat16_to_float(value) : float16_to_float(value);
  } else {
    return value;
  }
}

template <DType To, class Sum>
auto narrow(Sum value) {
  if constexpr (To == DType::bfloat16) {
    return float_to_bfloat16(value);
  } else if constexpr (To == DType::float16) {
    return float_to_float16(value);
  } else {
    return value;
  }
}

template <DType Type>
using Stored =
    std::conditional_t<Type == DType::float32, float,
                       std::conditional_t<Type == DType::float64, double, std::uint16_t>>;

template <DType From, DType To>
void sum_runs(std::span<const std::byte* const> sources, std::byte* out,
              std::int64_t num_elements) {
  using In = Stored<From>;
  using Out = Stored<To>;
  using Sum = std::conditional_t<From == DType::float64, double, float>;
  if (From == To && sources.size() == 1) {
    std::memcpy(out, sources[0], at(num_elements) * sizeof(In));
    return;
  }
  std::array<Sum, block_elements> sums{};
  std::array<In, block_elements> in;
  std::array<Out, block_elements> rounded;
  for (std::int64_t first = 0; first < num_elements; first += block_elements) {
    const std::size_t count = at(std::min(block_elements, num_elements - first));
    for (std::size_t k = 0; k < sources.size(); ++k) {
      std::memcpy(in.data(), sources[k] + at(first) * sizeof(In), count * sizeof(In));
      for (std::size_t i = 0; i < count; ++i) {
        const Sum value = widen<In, Sum>(in[i], From);
        sums[i] = k == 0 ? value : sums[i] + value;
      }
    }
    for (std::size_t i = 0; i < count; ++i) rounded[i] = narrow<To>(sums[i]);
    std::memcpy(out + at(first) * sizeof(Out), rounded.data(), count * sizeof(Out));
  }
}

}  // namespace

SumRuns sum_runs_of(DType from, DType to) {
  using enum DType;
  if (from == float32 && to == float32) return sum_runs<float32, float32>;
  if (from == float64 && to == float64) return sum_runs<float64, float64>;
  if (from == bfloat16 && to == bfloat16) return sum_runs<bfloat16, bfloat16>;
  if (from == bfloat16 && to == float32) return sum_runs<bfloat16, float32>;
  if (from == float16 && to == float16) return sum_runs<float16, float16>;
  if (from == float16 && to == float32) return sum_runs<float16, float32>;
  return nullptr;
}

}  // namespace waybill::detail
