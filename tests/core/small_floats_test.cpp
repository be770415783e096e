#include "waybill/core/small_floats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "waybill/core/error.h"
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

TEST(Float8E5m2, EveryCodeHasItsValueAndComesBack) {
  for (std::uint32_t i = 0; i < 256; ++i) {
    const auto code = static_cast<std::uint8_t>(i);
    const double expected = decode(i, 5, 2);
    const float value = float8_e5m2_to_float(code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << i;
      EXPECT_EQ(float_to_float8_e5m2(value), 0x7F) << i;
      continue;
    }
    EXPECT_EQ(static_cast<double>(value), expected) << i;
    EXPECT_EQ(std::signbit(value), i >= 0x80) << i;
    EXPECT_EQ(float_to_float8_e5m2(value), code) << i;
  }
}

TEST(Float8E5m2, RoundsToTheNearestTiesToEven) {
  for (std::uint32_t low = 0; low < 0x7B; ++low) {  // up to the largest
    const auto middle = static_cast<float>((decode(low, 5, 2) + decode(low + 1, 5, 2)) / 2);
    const std::uint32_t even = low % 2 == 0 ? low : low + 1;
    EXPECT_EQ(float_to_float8_e5m2(middle), even) << low;
    EXPECT_EQ(float_to_float8_e5m2(-middle), even | 0x80U) << low;
    EXPECT_EQ(float_to_float8_e5m2(std::nextafter(middle, 0.0F)), low) << low;
    EXPECT_EQ(float_to_float8_e5m2(std::nextafter(middle, infinity)), low + 1) << low;
  }
  EXPECT_EQ(float_to_float8_e5m2(std::nextafter(61440.0F, 0.0F)), 0x7B);
  EXPECT_EQ(float_to_float8_e5m2(61440.0F), 0x7C);
  EXPECT_EQ(float_to_float8_e5m2(-infinity), 0xFC);
}

TEST(ConvertFloats, ConvertsEachElementAsTheFunctionsDo) {
  Random random(3);
  HostTensor values(DType::float32, {3, 700});  // more than are converted together
  for (float& value : values.as<float>()) value = random.uniform_float() * 1000 - 500;
  const auto narrowed = [&](DType dtype) {
    HostTensor made(dtype, values.shape());
    convert_floats(values.view(), made.view());
    return made;
  };
  const HostTensor brain = narrowed(DType::bfloat16);
  const HostTensor half = narrowed(DType::float16);
  const HostTensor fine = narrowed(DType::float8_e4m3fn);
  const HostTensor wide = narrowed(DType::float8_e5m2);
  HostTensor back(DType::float16, values.shape());
  convert_floats(wide.view(), back.view());
  EXPECT_TRUE(std::ranges::equal(narrowed(DType::float32).bytes(), values.bytes()));
  for (std::size_t i = 0; i < values.as<float>().size(); ++i) {
    const float value = values.as<float>()[i];
    ASSERT_EQ(brain.as<std::uint16_t>()[i], float_to_bfloat16(value)) << i;
    ASSERT_EQ(half.as<std::uint16_t>()[i], float_to_float16(value)) << i;
    ASSERT_EQ(fine.as<std::uint8_t>()[i], float_to_float8_e4m3fn(value)) << i;
    ASSERT_EQ(wide.as<std::uint8_t>()[i], float_to_float8_e5m2(value)) << i;
    ASSERT_EQ(back.as<std::uint16_t>()[i], wide.as<std::uint8_t>()[i] << 8) << i;
  }
}

TEST(ConvertFloats, NamesWhatDoesNotFit) {
  const HostTensor values(DType::float32, {2, 3});
  const auto error_of = [&](DType dtype, const Shape& shape) {
    HostTensor to(dtype, shape);
    try {
      convert_floats(values.view(), to.view());
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(error_of(DType::float16, {2, 3}), "");
  EXPECT_NE(error_of(DType::float64, {2, 3}).find("got float64, expected float32"),
            std::string::npos);
  EXPECT_EQ(error_of(DType::float16, {3, 2}),
            "convert_floats: to has shape [3, 2], expected that of from, [2, 3]");
  HostTensor none(DType::bfloat16, {0, 3});
  convert_floats(HostTensor(DType::float32, {0, 3}).view(), none.view());
}

}  // namespace
}  // namespace waybill
