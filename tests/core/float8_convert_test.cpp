#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/number.h"
#include "waybill/core/random.h"

namespace waybill {
namespace {

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
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(float_to_float8_e4m3fn(infinity), 0x7E);
  EXPECT_EQ(float_to_float8_e4m3fn(-infinity), 0xFE);
  EXPECT_EQ(float_to_float8_e4m3fn(std::numeric_limits<float>::quiet_NaN()), 0x7F);
}

}  // namespace
}  // namespace waybill
