#include "waybill/core/small_floats.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <span>

#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr std::size_t piece = 1024;  // elements that are converted together

/// Calls use(element, to float, from float) for a dtype of convert_floats; not for others.
/// @return whether it is one
template <class Use>
bool for_float(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::float32:
      use(float{}, std::identity(), std::identity());
      return true;
    case DType::bfloat16:
      use(std::uint16_t{}, bfloat16_to_float, float_to_bfloat16);
      return true;
    case DType::float16:
      use(std::uint16_t{}, float16_to_float, float_to_float16);
      return true;
    case DType::float8_e4m3fn:
      use(std::uint8_t{}, float8_e4m3fn_to_float, float_to_float8_e4m3fn);
      return true;
    case DType::float8_e5m2:
      use(std::uint8_t{}, float8_e5m2_to_float, float_to_float8_e5m2);
      return true;
    default:
      return false;
  }
}

void load(const ConstTensorView& from, std::size_t first, std::span<float> values) {
  for_float(from.dtype, [&]<class Stored>(Stored /*tag*/, auto to_float, auto /*from_float*/) {
    std::ranges::transform(from.as<Stored>().subspan(first, values.size()), values.begin(),
                           to_float);
  });
}

void store(std::span<const float> values, const TensorView& to, std::size_t first) {
  for_float(to.dtype, [&]<class Stored>(Stored /*tag*/, auto /*to_float*/, auto from_float) {
    std::ranges::transform(values, to.as<Stored>().subspan(first, values.size()).begin(),
                           from_float);
  });
}

}  // namespace

void convert_floats(const ConstTensorView& from, const TensorView& to) {
  for (const DType dtype : {from.dtype, to.dtype}) {
    require(for_float(dtype, [](auto...) {}), "convert_floats: got ", dtype_name(dtype),
            ", expected float32, bfloat16, float16, float8_e4m3fn or float8_e5m2");
  }
  require(from.shape == to.shape, "convert_floats: to has shape ", to_string(to.shape),
          ", expected that of from, ", to_string(from.shape));
  const auto count = static_cast<std::size_t>(num_elements(from.shape, "convert_floats"));
  std::array<float, piece> values{};
  for (std::size_t first = 0; first < count; first += piece) {
    const auto some = std::span(values).first(std::min(piece, count - first));
    load(from, first, some);
    store(some, to, first);
  }
}

}  // namespace waybill
