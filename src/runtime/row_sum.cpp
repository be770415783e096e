#include "row_sum.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "core/float_convert.h"
#include "core/to_size.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t block_elements = 512;

template <DType Type>
using Stored =
    std::conditional_t<Type == DType::float32, float,
                       std::conditional_t<Type == DType::float64, double, std::uint16_t>>;

template <DType From, class Sum>
Sum widen(Stored<From> value) {
  if constexpr (From == DType::bfloat16) {
    return bfloat16_to_float(value);
  } else if constexpr (From == DType::float16) {
    return float16_to_float(value);
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

/// Reads `count` elements as they are summed.
template <DType From, class Sum>
void load(const std::byte* data, std::size_t first, std::size_t count, Sum* values) {
  std::array<Stored<From>, block_elements> in;
  std::memcpy(in.data(), data + first * sizeof(in[0]), count * sizeof(in[0]));
  for (std::size_t i = 0; i < count; ++i) values[i] = widen<From, Sum>(in[i]);
}

template <DType From, DType To>
void sum_as(std::span<const SumAddend> addends, std::byte* out, std::int64_t num_elements) {
  using Out = Stored<To>;
  using Sum = std::conditional_t<From == DType::float64, double, float>;
  constexpr DType sum_type = From == DType::float64 ? DType::float64 : DType::float32;
  if (addends.size() == 1 && (addends[0].is_sum ? sum_type : From) == To) {
    std::memcpy(out, addends[0].data, to_size(num_elements) * sizeof(Out));
    return;
  }
  std::array<Sum, block_elements> sums{};
  std::array<Sum, block_elements> values;
  std::array<Out, block_elements> rounded;
  for (std::int64_t first = 0; first < num_elements; first += block_elements) {
    const std::size_t count = to_size(std::min(block_elements, num_elements - first));
    for (std::size_t k = 0; k < addends.size(); ++k) {
      Sum* const into = k == 0 ? sums.data() : values.data();
      if (addends[k].is_sum) {
        load<sum_type, Sum>(addends[k].data, to_size(first), count, into);
      } else {
        load<From, Sum>(addends[k].data, to_size(first), count, into);
      }
      for (std::size_t i = 0; k > 0 && i < count; ++i) sums[i] += values[i];
    }
    for (std::size_t i = 0; i < count; ++i) rounded[i] = narrow<To>(sums[i]);
    std::memcpy(out + to_size(first) * sizeof(Out), rounded.data(), count * sizeof(Out));
  }
}

using SumAs = void (*)(std::span<const SumAddend>, std::byte*, std::int64_t);

SumAs sum_of(DType from, DType to) {
  using enum DType;
  if (from == float32 && to == float32) return sum_as<float32, float32>;
  if (from == float64 && to == float64) return sum_as<float64, float64>;
  if (from == bfloat16 && to == bfloat16) return sum_as<bfloat16, bfloat16>;
  if (from == bfloat16 && to == float32) return sum_as<bfloat16, float32>;
  if (from == float16 && to == float16) return sum_as<float16, float16>;
  if (from == float16 && to == float32) return sum_as<float16, float32>;
  return nullptr;
}

}  // namespace

bool can_sum(DType from, DType to) { return sum_of(from, to) != nullptr; }

void sum_runs(std::span<const SumAddend> addends, DType from, DType to, std::byte* out,
              std::int64_t num_elements) {
  const SumAs sum = sum_of(from, to);
  require(sum != nullptr, "sum_runs: from ", from, " to ", to, ", expected dtypes that can_sum");
  sum(addends, out, num_elements);
}

}  // namespace waybill::detail
