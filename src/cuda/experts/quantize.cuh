#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

namespace waybill::cuda {

// Arithmetic of the device quantisers of all formats. The functions run on the host, too, where a
// test compares them with the specification (src/moe/payloads). Each operation rounds once, to
// nearest, ties to even.

__host__ __device__ inline std::uint32_t as_bits(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}
__host__ __device__ inline float as_float(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

/// |x| as bits, which order like the numbers, with infinity and NaN above all others.
__host__ __device__ inline std::uint32_t size_bits(float value) {
  return as_bits(value) & 0x7FFFFFFFU;
}
inline constexpr std::uint32_t infinity_bits = 0x7F800000U;
inline constexpr std::uint32_t quiet_nan_bits = 0x7FC00000U;

/// a * b, which no compiler fuses with a sum.
__host__ __device__ inline float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__host__ __device__ inline float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

__host__ __device__ inline float reciprocal(float value) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(value);
#else
  return 1.0F / value;
#endif
}

/// Elements that a lane quantises together.
inline constexpr int lane_elements = 8;

/// Divides numbers by the same positive number. With the reciprocal in two parts a division takes
/// five instructions. The first quotient is within one unit of the last place. Its remainder is
/// exact, so the sum with remainder times reciprocal is the quotient to nearest (Markstein,
/// "Computation of elementary functions on the IBM RISC System/6000 processor", 1990, theorem 7.2).
class Divisor {
 public:
  __host__ __device__ explicit Divisor(float divisor)
      : divisor_(divisor),
        high_(reciprocal(divisor)),
        low_(product(fmaf(-divisor, high_, 1.0F), high_)) {}

  /// @pre is_plain(). Quotients of less than 2^-12 may differ in their last bits, and round to 0 in
  /// all formats.
  [[nodiscard]] __host__ __device__ float divide(float x) const {
    const float near = fmaf(x, high_, product(x, low_));
    const float rest = fmaf(-divisor_, near, x);
    return copysignf(fmaf(rest, high_, near), x);  // also the sign of zero
  }

  /// Divides all. A quotient that is NaN is a positive one.
  __host__ __device__ void divide(float (&x)[lane_elements]) const {
    if (is_plain()) {
      for (float& value : x) value = divide(value);
      return;
    }
    for (float& value : x) {
      value = quotient(value, divisor_);
      if (size_bits(value) > infinity_bits) value = as_float(quiet_nan_bits);
    }
  }

  /// Whether no intermediate result of divide() leaves the range of normal numbers.
  [[nodiscard]] __host__ __device__ bool is_plain() const {
    return 0x1p-60F <= divisor_ && divisor_ <= 0x1p60F;
  }

 private:
  float divisor_;
  float high_;
  float low_;
};

/// Codes of one byte, the largest normal number at most. NaN is 0x7F if it is positive. The device
/// has an instruction for it from sm_89 on.
template <__nv_fp8_interpretation_t Kind>
__host__ __device__ inline std::uint64_t float8_codes(const float (&x)[lane_elements]) {
  std::uint64_t codes = 0;
  for (int e = 0; e < lane_elements; e += 2) {
    const float2 pair{x[e], x[e + 1]};
    codes |= std::uint64_t{__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, Kind)} << (8 * e);
  }
  return codes;
}

// A format is a class whose object is what the lanes of one group share. src/moe/payloads specifies
// what it does.

/// In formats without a scale of the row its groups share nothing.
struct NoRow {
  __host__ __device__ explicit NoRow(std::uint32_t /*largest*/) {}
};

/// float8 of src/moe/payloads/float8.cpp.
class Float8 {
 public:
  static constexpr int group = 128;
  static constexpr bool has_row_scale = false;
  using Row = NoRow;
  using Scale = float;
  using Elements = std::uint64_t;  ///< lane_elements of them

  /// @param largest size_bits() of the group's largest element
  __host__ __device__ Float8(std::uint32_t largest, const Row& /*row*/)
      : scale_(largest > infinity_bits ? as_float(quiet_nan_bits)
                                       : product(as_float(largest), 1.0F / 448.0F)),
        divisor_(scale_) {}

  [[nodiscard]] __host__ __device__ Scale scale() const { return scale_; }

  [[nodiscard]] __host__ __device__ Elements quantize(float (&x)[lane_elements]) const {
    if (scale_ == 0) return 0;
    divisor_.divide(x);
    return float8_codes<__NV_E4M3>(x);
  }

 private:
  float scale_;
  Divisor divisor_;
};

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

using Float8Ue8m0 = PowerScaled<__NV_E4M3, 8, 128, true>;
using Mxfp8 = PowerScaled<__NV_E4M3, 8, 32, false>;
using Mxfp8E5m2 = PowerScaled<__NV_E5M2, 15, 32, false>;

/// nvfp4 of src/moe/payloads/nvfp4.cpp.
class Nvfp4 {
 public:
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
