#pragma once

#include <string_view>

#include "../../device/rounding.cuh"

namespace waybill::cuda {

/// nvfp4 of src/moe/payloads/nvfp4.cpp.
class Nvfp4 {
 public:
  static constexpr std::string_view name = "nvfp4";
  static constexpr int group = 16;
  static constexpr bool has_row_scale = true;
  using Scale = std::uint8_t;
  using Elements = std::uint32_t;

  /// The scale of a row, shared by its groups.
  struct Row {
    /// @param largest size_bits() of the largest element of the groups without infinity and NaN
    __host__ __device__ explicit Row(std::uint32_t largest)
        : scale(quotient(as_float(largest), 2688.0F)), divisor(scale) {}
    float scale;
    Divisor divisor;
  };

  __host__ __device__ Nvfp4(std::uint32_t largest, const Row& row)
      : scale_(scale_of(largest, row)), unit_(unit_of(scale_, row)), divisor_(unit_) {}

  [[nodiscard]] __host__ __device__ Scale scale() const { return static_cast<Scale>(scale_); }

  [[nodiscard]] __host__ __device__ Elements quantize(float (&x)[lane_elements]) const {
    if (!(unit_ > 0)) return 0;
    divisor_.divide(x);
    Elements codes = 0;
    for (int e = 0; e < lane_elements; ++e) codes |= code_of(x[e]) << (4 * e);
    return codes;
  }

 private:
  static constexpr std::uint32_t nan_scale = 0x7F;

  __host__ __device__ static std::uint32_t scale_of(std::uint32_t largest, const Row& row) {
    if (largest >= infinity_bits) return nan_scale;
    if (row.scale == 0) return 0;
    const float sixth = quotient(as_float(largest), 6.0F);
    const float scale =
        row.divisor.is_plain() ? row.divisor.divide(sixth) : quotient(sixth, row.scale);
    return __nv_cvt_float_to_fp8(scale, __NV_SATFINITE, __NV_E4M3);
  }

  /// The scale of the group times that of the row; 0 for one that is NaN.
  __host__ __device__ static float unit_of(std::uint32_t scale, const Row& row) {
    if (scale == nan_scale) return 0;
    const float value =
        scale < 8 ? product(static_cast<float>(scale), 0x1p-9F) : as_float((scale + 0x3C0U) << 20);
    return product(value, row.scale);
  }

  /// To the nearest e2m1, ties to the even code; 6 at most. Not for NaN.
  __host__ __device__ static std::uint32_t code_of(float value) {
    const float size = fminf(fabsf(value), 6.0F);
    // Elements in [2^e, 2^(e + 1)) are multiples of 2^(e - 1), and those below 1, as if e were 0.
    // That is the unit of the last place of sums with 2^(e + 22). Their low bits count the units;
    // the code is that count plus 2e, and 2 (e + 22 + 127) is 2e + 2 modulo 8.
    const std::uint32_t power = as_bits(size) & infinity_bits;
    const std::uint32_t one = 127U << 23;
    const float sum = size + as_float((power < one ? one : power) + (22U << 23));
    const std::uint32_t code = (as_bits(sum) + (as_bits(sum) >> 22) - 2U) & 7U;
    return code | (as_bits(value) >> 28 & 8U);
  }

  std::uint32_t scale_;
  float unit_;
  Divisor divisor_;
};

}  // namespace waybill::cuda
