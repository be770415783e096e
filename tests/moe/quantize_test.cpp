#include "waybill/moe/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/number.h"
#include "support/expect_error.h"
#include "waybill/core/random.h"

namespace waybill {
namespace {

struct Quantized {
  std::vector<std::uint8_t> elements;
  std::vector<float> scales;
};

Quantized quantized(const std::vector<float>& row) {
  Quantized result{std::vector<std::uint8_t>(row.size()), std::vector<float>(row.size() / 128)};
  quantize_row(row.data(), DType::float32, result.elements, result.scales);
  return result;
}

TEST(QuantizeRow, TheLargestElementBecomes448) {
  std::vector<float> row(256, 1.0F);
  row[3] = -7;
  row[200] = 896;
  const Quantized q = quantized(row);
  EXPECT_EQ(q.scales[0], 7.0F * (1.0F / 448.0F));
  EXPECT_EQ(q.scales[1], 896.0F * (1.0F / 448.0F));
  EXPECT_EQ(float8_e4m3fn_to_float(q.elements[3]), -448);
  EXPECT_EQ(float8_e4m3fn_to_float(q.elements[200]), 448);
  EXPECT_EQ(float8_e4m3fn_to_float(q.elements[0]), 64);
  EXPECT_EQ(float8_e4m3fn_to_float(q.elements[130]), 0.5F);
}

TEST(QuantizeRow, AGroupOfZerosIsZeros) {
  std::vector<float> row(256, 0.0F);
  row[1] = -0.0F;
  row[128] = 3;
  const Quantized q = quantized(row);
  EXPECT_EQ(q.scales[0], 0.0F);
  for (std::size_t i = 0; i < 128; ++i) EXPECT_EQ(q.elements[i], 0) << i;
  EXPECT_EQ(q.elements[128], 0x7E);
}

TEST(QuantizeRow, ANanSpoilsItsGroupAlone) {
  std::vector<float> row(256, 1.0F);
  row[5] = std::numeric_limits<float>::quiet_NaN();
  row[6] = 1e30F;
  const Quantized q = quantized(row);
  EXPECT_TRUE(std::isnan(q.scales[0]));
  for (std::size_t i = 0; i < 128; ++i) EXPECT_EQ(q.elements[i], 0x7F) << i;
  EXPECT_EQ(q.elements[200], 0x7E);
}

TEST(QuantizeRow, ComesBackWithinHalfAStep) {
  Random random(4);
  std::vector<std::uint16_t> row(512);
  for (auto& bits : row) bits = float_to_bfloat16(random.uniform_float() * 20 - 10);
  Quantized q{std::vector<std::uint8_t>(512), std::vector<float>(4)};
  quantize_row(row.data(), DType::bfloat16, q.elements, q.scales);
  std::vector<float> back(512);
  dequantize_row(q.elements, q.scales, back.data(), DType::float32);
  for (std::size_t i = 0; i < 512; ++i) {
    const float value = bfloat16_to_float(row[i]);
    EXPECT_NEAR(back[i], value, std::fabs(value) / 16 + q.scales[i / 128] / 512) << i;
  }
  std::vector<std::uint16_t> rounded(512);
  dequantize_row(q.elements, q.scales, rounded.data(), DType::bfloat16);
  for (std::size_t i = 0; i < 512; ++i) EXPECT_EQ(rounded[i], float_to_bfloat16(back[i]));
}

TEST(QuantizeRow, RefusesWhatDoesNotFit) {
  std::vector<float> row(256);
  std::vector<std::uint8_t> elements(256);
  std::vector<float> scales(1);
  EXPECT_TRUE(test::rejects([&] { quantize_row(row.data(), DType::float32, elements, scales); },
                            {"256", "128"}));
  scales.resize(2);
  EXPECT_TRUE(test::rejects([&] { quantize_row(row.data(), DType::int32, elements, scales); },
                            {"dtype = int32"}));
}

}  // namespace
}  // namespace waybill
