#include "waybill/core/small_floats.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr std::size_t piece = 1024;  // elements that are converted together

/// Whether `dtype` is one of those of convert_floats.
bool is_converted(DType dtype) {
  switch (dtype) {
    case DType::float32:
    case DType::bfloat16:
    case DType::float16:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      return true;
    default:
      return false;
  }
}

void load(const ConstTensorView& from, std::size_t first, std::span<float> values) {
  const auto widen = [&]<class Stored>(Stored /*tag*/, auto to_float) {
    std::ranges::transform(from.as<Stored>().subspan(first, values.size()), values.begin(),
                           to_float);
  };
  switch (from.dtype) {
    case DType::bfloat16:
      return widen(std::uint16_t{}, bfloat16_to_float);
    case DType::float16:
      return widen(std::uint16_t{}, float16_to_float);
    case DType::float8_e4m3fn:
      return widen(std::uint8_t{}, float8_e4m3fn_to_float);
    case DType::float8_e5m2:
      return widen(std::uint8_t{}, float8_e5m2_to_float);
    default:
      return widen(float{}, [](float value) { return value; });
  }
}

void store(std::span<const float> values, const TensorView& to, std::size_t first) {
  const auto narrow = [&]<class Stored>(Stored /*tag*/, auto from_float) {
    std::ranges::transform(values, to.as<Stored>().subspan(first, values.size()).begin(),
                           from_float);
  };
  switch (to.dtype) {
    case DType::bfloat16:
      return narrow(std::uint16_t{}, float_to_bfloat16);
    case DType::float16:
      return narrow(std::uint16_t{}, float_to_float16);
    case DType::float8_e4m3fn:
      return narrow(std::uint8_t{}, float_to_float8_e4m3fn);
    case DType::float8_e5m2:
      return narrow(std::uint8_t{}, float_to_float8_e5m2);
    default:
      return narrow(float{}, [](float value) { return value; });
  }
}

}  // namespace

void convert_floats(const ConstTensorView& from, const TensorView& to) {
  for (const DType dtype : {from.dtype, to.dtype}) {
    require(is_converted(dtype), "convert_floats: got ", dtype_name(dtype),
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
