#pragma once

#include "float8.cuh"

namespace waybill::cuda {

/// Formats of src/moe/payloads/mx.cpp, whose scales are powers of two.
/// @tparam LargestExponent that of the largest element, which is 1.75 * 2^LargestExponent
/// @tparam Fits the scale is as large as it must be for all elements to fit
template <__nv_fp8_interpretation_t Kind, unsigned LargestExponent, int Group, bool Fits>
class PowerScaled {
 public:
  static constexpr int group = Group;
  static constexpr bool has_row_scale = false;
  using Row = NoRow;
  using Scale = std::uint8_t;
  using Elements = std::uint64_t;

  __host__ __device__ PowerScaled(std::uint32_t largest, const Row& /*row*/)
      : scale_(scale_of(largest)) {}

  [[nodiscard]] __host__ __device__ Scale scale() const { return static_cast<Scale>(scale_); }

  [[nodiscard]] __host__ __device__ Elements quantize(float (&x)[lane_elements]) const {
    if (scale_ == nan_scale) return 0x7F7F7F7F7F7F7F7FU;
    const float factor = as_float((254 - scale_) << 23);  // 2^(127 - scale), a normal number
    for (float& value : x) value = product(value, factor);
    return float8_codes<Kind>(x);
  }

 private:
  static constexpr std::uint32_t nan_scale = 0xFF;

  __host__ __device__ static std::uint32_t scale_of(std::uint32_t largest) {
    if (largest >= infinity_bits) return nan_scale;
    std::uint32_t exponent = largest >> 23;
    if (Fits && (largest & 0x7FFFFFU) > 0x600000U) ++exponent;
    return exponent < LargestExponent ? 0 : exponent - LargestExponent;
  }

  std::uint32_t scale_;
};

struct Float8Ue8m0 : PowerScaled<__NV_E4M3, 8, 128, true> {
  static constexpr std::string_view name = "float8_ue8m0";
  using PowerScaled::PowerScaled;
};

struct Mxfp8 : PowerScaled<__NV_E4M3, 8, 32, false> {
  static constexpr std::string_view name = "mxfp8";
  using PowerScaled::PowerScaled;
};

struct Mxfp8E5m2 : PowerScaled<__NV_E5M2, 15, 32, false> {
  static constexpr std::string_view name = "mxfp8_e5m2";
  using PowerScaled::PowerScaled;
};

}  // namespace waybill::cuda
