#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "waybill/core/dtype.h"
#include "waybill/core/small_floats.h"

namespace waybill::detail {

// How each dtype that is summed is stored, and what it is summed in: device/number.cuh has the same
// for the device.

struct Float32 {
  static constexpr DType dtype = DType::float32;
  using Stored = float;
  using Sum = float;
  static Sum load(Stored value) noexcept { return value; }
  static Stored round(Sum value) noexcept { return value; }
};

struct Float64 {
  static constexpr DType dtype = DType::float64;
  using Stored = double;
  using Sum = double;
  static Sum load(Stored value) noexcept { return value; }
  static Stored round(Sum value) noexcept { return value; }
};

struct BFloat16 {
  static constexpr DType dtype = DType::bfloat16;
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored value) noexcept { return bfloat16_to_float(value); }
  static Stored round(Sum value) noexcept { return float_to_bfloat16(value); }
};

struct Float16 {
  static constexpr DType dtype = DType::float16;
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored value) noexcept { return float16_to_float(value); }
  static Stored round(Sum value) noexcept { return float_to_float16(value); }
};

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
