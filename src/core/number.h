#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "waybill/core/dtype.h"
#include "waybill/core/small_floats.h"

namespace waybill::detail {

// How each dtype that is summed is stored, and what it is summed in: device/number.cuh has the same
// for the device.

template <DType stored_as, class Real>
struct WideNumber {
  static constexpr DType dtype = stored_as;
  using Stored = Real;
  using Sum = Real;
  static Sum load(Stored value) noexcept { return value; }
  static Stored round(Sum value) noexcept { return value; }
};
using Float32 = WideNumber<DType::float32, float>;
using Float64 = WideNumber<DType::float64, double>;

template <DType stored_as, auto to_float, auto from_float>
struct HalfNumber {
  static constexpr DType dtype = stored_as;
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored value) noexcept { return to_float(value); }
  static Stored round(Sum value) noexcept { return from_float(value); }
};
using BFloat16 = HalfNumber<DType::bfloat16, bfloat16_to_float, float_to_bfloat16>;
using Float16 = HalfNumber<DType::float16, float16_to_float, float_to_float16>;

/// Calls `use` with the number of a dtype that is summed; not for other dtypes.
/// @return whether it is one
template <class Use>
bool for_number(DType dtype, Use&& use) {
  switch (dtype) {
    case DType::float32:
      use(Float32{});
      return true;
    case DType::float64:
      use(Float64{});
      return true;
    case DType::bfloat16:
      use(BFloat16{});
      return true;
    case DType::float16:
      use(Float16{});
      return true;
    default:
      return false;
  }
}

[[nodiscard]] inline bool is_summed(DType dtype) {
  return for_number(dtype, [](auto /*number*/) {});
}

/// The names that dtype_from_name takes: of every dtype, and the shorter ones that some have, too.
[[nodiscard]] std::vector<std::string_view> dtype_names();
[[nodiscard]] std::vector<std::string_view> short_dtype_names();

}  // namespace waybill::detail
