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

}  // namespace waybill::cuda
