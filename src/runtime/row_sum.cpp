#include "row_sum.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "core/number.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t block_elements = 512;

/// Reads `count` elements as they are summed.
template <class From, class Sum>
void load(const std::byte* data, std::size_t first, std::size_t count, Sum* values) {
  std::array<typename From::Stored, block_elements> in;
  std::memcpy(in.data(), data + first * sizeof(in[0]), count * sizeof(in[0]));
  for (std::size_t i = 0; i < count; ++i) values[i] = From::load(in[i]);
}

/// The type in which sums of a number travel.
template <class From>
using SumOf = std::conditional_t<std::is_same_v<typename From::Sum, double>, Float64, Float32>;

template <class From, class To>
void sum_as(std::span<const SumAddend> addends, std::byte* out, std::int64_t num_elements) {
  using Out = typename To::Stored;
  using Sum = typename From::Sum;
  using OnTheWay = SumOf<From>;
  if (addends.size() == 1 && (addends[0].is_sum ? OnTheWay::dtype : From::dtype) == To::dtype) {
    std::memcpy(out, addends[0].data, num_elements * sizeof(Out));
    return;
  }
  std::array<Sum, block_elements> sums{};
  std::array<Sum, block_elements> values;
  std::array<Out, block_elements> rounded;
  for (std::int64_t first = 0; first < num_elements; first += block_elements) {
    const std::size_t count = std::min(block_elements, num_elements - first);
    for (std::size_t k = 0; k < addends.size(); ++k) {
      Sum* const into = k == 0 ? sums.data() : values.data();
      if (addends[k].is_sum) {
        load<OnTheWay>(addends[k].data, first, count, into);
      } else {
        load<From>(addends[k].data, first, count, into);
      }
      for (std::size_t i = 0; k > 0 && i < count; ++i) sums[i] += values[i];
    }
    for (std::size_t i = 0; i < count; ++i) rounded[i] = To::round(sums[i]);
    std::memcpy(out + first * sizeof(Out), rounded.data(), count * sizeof(Out));
  }
}

using SumAs = void (*)(std::span<const SumAddend>, std::byte*, std::int64_t);

/// To the same dtype, or to that of sums.
SumAs sum_of(DType from, DType to) {
  SumAs sum = nullptr;
  for_number(from, [&]<class From>(From) {
    if (to == From::dtype) {
      sum = sum_as<From, From>;
    } else if (to == SumOf<From>::dtype) {
      sum = sum_as<From, SumOf<From>>;
    }
  });
  return sum;
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
