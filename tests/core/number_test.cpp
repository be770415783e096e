#include "core/number.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "waybill/core/random.h"

namespace waybill {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// The value of a small float format, by the definition of IEEE 754.
double decode(std::uint32_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t exponent = (bits >> fraction_bits) & ((1U << exponent_bits) - 1);
  const std::uint32_t fraction = bits & ((1U << fraction_bits) - 1);
  const double sign = (bits >> (exponent_bits + fraction_bits)) != 0 ? -1 : 1;
  if (exponent == (1U << exponent_bits) - 1) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1U << fraction_bits),
                           static_cast<int>(exponent) - bias - fraction_bits);
}

struct Format {
  int exponent_bits;
  int fraction_bits;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);
};

const Format float16{5, 10, float16_to_float, float_to_float16};
const Format bfloat16{8, 7, bfloat16_to_float, float_to_bfloat16};

void check_every_value(const Format& format) {
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const double expected = decode(bits, format.exponent_bits, format.fraction_bits);
    const float got = format.widen(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << i;
      ASSERT_TRUE(std::isnan(format.widen(format.narrow(got)))) << i;
      continue;
    }
    ASSERT_EQ(static_cast<double>(got), expected) << i;
    ASSERT_EQ(std::signbit(got), std::signbit(expected)) << i;
    ASSERT_EQ(format.narrow(got), bits) << i;
  }
}

/// Between two neighbours: the nearer one, at the middle the even one. Positive and negative.
void check_rounding(const Format& format) {
  const std::uint32_t last = ((1U << format.exponent_bits) - 1)
                             << format.fraction_bits;  // infinity
  for (std::uint32_t i = 0; i + 1 < last; ++i) {
    const auto low = static_cast<std::uint16_t>(i);
    const auto high = static_cast<std::uint16_t>(i + 1);
    const float middle = static_cast<float>(
        (static_cast<double>(format.widen(low)) + static_cast<double>(format.widen(high))) / 2);
    const std::uint16_t even = i % 2 == 0 ? low : high;
    ASSERT_EQ(format.narrow(middle), even) << i;
    ASSERT_EQ(format.narrow(-middle), even | 0x8000) << i;
    ASSERT_EQ(format.narrow(std::nextafter(middle, 0.0F)), low) << i;
    ASSERT_EQ(format.narrow(std::nextafter(middle, infinity)), high) << i;
  }
}

TEST(float_convert, every_value_widens_exactly_and_comes_back) {
  check_every_value(float16);
  check_every_value(bfloat16);
}

TEST(float_convert, rounds_to_nearest_even) {
  check_rounding(float16);
  check_rounding(bfloat16);
}

TEST(float_convert, overflow_and_special_values) {
  EXPECT_EQ(float_to_float16(65504.0F), 0x7BFF);
  EXPECT_EQ(float_to_float16(65519.996F), 0x7BFF);
  EXPECT_EQ(float_to_float16(65520.0F), 0x7C00);
  EXPECT_EQ(float_to_float16(-1e30F), 0xFC00);
  EXPECT_EQ(float_to_float16(infinity), 0x7C00);
  EXPECT_EQ(float_to_float16(0x1p-25F), 0);
  EXPECT_EQ(float_to_float16(0x1.000002p-25F), 1);
  EXPECT_EQ(float_to_float16(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(float_to_bfloat16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(float_to_bfloat16(-infinity), 0xFF80);
  // A NaN whose set bits all lie below what is kept must not turn into infinity.
  const float nan = std::bit_cast<float>(0x7F800001U);
  EXPECT_TRUE(std::isnan(float16_to_float(float_to_float16(nan))));
  EXPECT_TRUE(std::isnan(bfloat16_to_float(float_to_bfloat16(nan))));
}

/// A finite code's value by the definition of the format: 4 bits of exponent (bias 7), 3 of
/// mantissa.
double value_of(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

/// The nearest code by trying all; of two as near, the even one.
int nearest_code(double value) {
  int best = 0;
  for (int code = 1; code <= 0x7E; ++code) {
    const double distance = std::fabs(std::fabs(value) - value_of(code));
    const double before = std::fabs(std::fabs(value) - value_of(best));
    if (distance < before || (distance == before && code % 2 == 0)) best = code;
  }
  return best + (std::signbit(value) ? 0x80 : 0);
}

TEST(Float8E4m3, EveryCodeHasItsValueAndComesBack) {
  for (int code = 0; code < 256; ++code) {
    const float value = float8_e4m3fn_to_float(static_cast<std::uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << code;
      continue;
    }
    EXPECT_EQ(value, value_of(code)) << code;
    EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
    EXPECT_EQ(float_to_float8_e4m3fn(value), code);
  }
}

TEST(Float8E4m3, RoundsToTheNearestTiesToEven) {
  Random random(1);
  std::vector<float> values{17, 19, 447, 448, 449, 464, 1e30F, 0x1p-10F, 0x1.8p-9F, 0x1p-149F};
  for (int code = 0; code < 0x7E; ++code) {
    const auto middle = static_cast<float>((value_of(code) + value_of(code + 1)) / 2);
    values.insert(values.end(), {middle, std::nextafterf(middle, 0), std::nextafterf(middle, 500)});
  }
  for (int i = 0; i < 2000; ++i) {
    values.push_back(
        std::ldexp(random.uniform_float() + 1, static_cast<int>(random.below(24)) - 13));
  }
  for (const float value : values) {
    EXPECT_EQ(float_to_float8_e4m3fn(value), nearest_code(value)) << value;
    EXPECT_EQ(float_to_float8_e4m3fn(-value), nearest_code(-value)) << -value;
  }
}

TEST(Float8E4m3, InfinityIsTheLargestAndNanIsNan) {
  EXPECT_EQ(float_to_float8_e4m3fn(infinity), 0x7E);
  EXPECT_EQ(float_to_float8_e4m3fn(-infinity), 0xFE);
  EXPECT_EQ(float_to_float8_e4m3fn(std::numeric_limits<float>::quiet_NaN()), 0x7F);
}

}  // namespace
}  // namespace waybill

namespace waybill::detail {
namespace {

TEST(Number, HasTheDtypesThatAreSummed) {
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
    bool same = false;
    EXPECT_TRUE(for_number(dtype, [&]<class Number>(Number) {
      same = Number::dtype == dtype &&
             static_cast<std::int64_t>(sizeof(typename Number::Stored)) == dtype_bytes(dtype) &&
             Number::load(Number::round(-2.5F)) == -2.5F;
    })) << dtype;
    EXPECT_TRUE(same && is_summed(dtype)) << dtype;
  }
  for (const DType dtype : {DType::int32, DType::boolean, DType::float8_e4m3fn, DType::float8_e5m2})
    EXPECT_FALSE(is_summed(dtype)) << dtype;
}

TEST(Number, RoundsToTheNearest) {
  EXPECT_EQ(BFloat16::load(BFloat16::round(1.0F + 0x1p-9F)), 1.0F);  // a tie goes to even
  EXPECT_EQ(Float16::load(Float16::round(1.0F + 0x1p-10F)), 1.0F + 0x1p-10F);
  EXPECT_EQ(Float64::round(0.1), 0.1);
}

}  // namespace
}  // namespace waybill::detail
