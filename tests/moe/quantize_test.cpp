#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "core/number.h"
#include "support/expect_error.h"
#include "waybill/core/random.h"
#include "waybill/moe/payload_format.h"

namespace waybill {
namespace {

const PayloadFormat& float8 = EPPayload::quantized.format();

std::span<std::uint8_t> bytes_of(std::vector<float>& scales) {
  return {reinterpret_cast<std::uint8_t*>(scales.data()), scales.size() * sizeof(float)};
}

struct Quantized {
  std::vector<std::uint8_t> elements;
  std::vector<float> scales;
};

Quantized quantized(const std::vector<float>& row) {
  Quantized result{std::vector<std::uint8_t>(row.size()), std::vector<float>(row.size() / 128)};
  quantize_row(float8, row.data(), DType::float32, result.elements, bytes_of(result.scales));
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
  quantize_row(float8, row.data(), DType::bfloat16, q.elements, bytes_of(q.scales));
  std::vector<float> back(512);
  dequantize_row(float8, q.elements, bytes_of(q.scales), back.data(), DType::float32);
  for (std::size_t i = 0; i < 512; ++i) {
    const float value = bfloat16_to_float(row[i]);
    EXPECT_NEAR(back[i], value, std::fabs(value) / 16 + q.scales[i / 128] / 512) << i;
  }
  std::vector<std::uint16_t> rounded(512);
  dequantize_row(float8, q.elements, bytes_of(q.scales), rounded.data(), DType::bfloat16);
  for (std::size_t i = 0; i < 512; ++i) EXPECT_EQ(rounded[i], float_to_bfloat16(back[i]));
}

TEST(QuantizeRow, RefusesWhatDoesNotFit) {
  std::vector<float> row(256);
  std::vector<std::uint8_t> elements(256);
  std::vector<std::uint8_t> scales(4);
  const auto quantize = [&](const PayloadFormat& format, DType dtype) {
    quantize_row(format, row.data(), dtype, elements, scales);
  };
  EXPECT_TRUE(test::rejects([&] { quantize(float8, DType::float32); },
                            {"256 bytes of elements with 4 bytes", "expected 8"}));
  scales.resize(8);
  EXPECT_TRUE(test::rejects([&] { quantize(float8, DType::int32); }, {"dtype = int32"}));
  EXPECT_TRUE(test::rejects([&] { quantize(payload_formats().front(), DType::float32); },
                            {"format = \"plain\"", "a quantiser"}));
  elements.resize(255);
  EXPECT_TRUE(test::rejects([&] { quantize(float8, DType::float32); }, {"multiple of 128"}));
}

struct Row {
  std::vector<std::uint8_t> elements;
  std::vector<std::uint8_t> scales;
};

Row row_in(const char* name, const std::vector<float>& row) {
  const PayloadFormat& format = payload_format(name, "format");
  const EPPayload payload(format, true);
  const auto hidden = static_cast<std::int64_t>(row.size());
  Row made{std::vector<std::uint8_t>(payload.row_bytes(DType::float32, hidden)),
           std::vector<std::uint8_t>(payload.scale_bytes(hidden))};
  quantize_row(format, row.data(), DType::float32, made.elements, made.scales);
  return made;
}

// OCP Microscaling Formats specification 1.0, section 6.3: 2^floor(log2(max)) / 2^8.
TEST(Mxfp8, TheScaleIsAPowerOfTwo) {
  std::vector<float> row(64, 1.0F);
  row[0] = 500;   // 2^8 <= 500 < 2^9: scale 1; 500 is more than 448, the largest
  row[1] = -500;  // keeps its sign
  row[2] = 17;    // between 16 and 18: ties go to the even one
  row[32] = 0.25F;
  row[33] = -0.0F;
  const Row made = row_in("mxfp8", row);
  EXPECT_EQ(made.scales, (std::vector<std::uint8_t>{127, 119}));  // 2^0 and 2^-8: 1 is 2^0
  EXPECT_EQ(made.elements[0], 0x7E);
  EXPECT_EQ(made.elements[1], 0xFE);
  EXPECT_EQ(float8_e4m3fn_to_float(made.elements[2]), 16);
  EXPECT_EQ(float8_e4m3fn_to_float(made.elements[32]), 64);
  EXPECT_EQ(float8_e4m3fn_to_float(made.elements[34]), 256);
  EXPECT_EQ(made.elements[33], 0x80);
}

TEST(Mxfp8, OfE5m2StaysFinite) {
  std::vector<float> row(32, 0.0F);
  row[0] = 65000;  // 2^15 <= 65000 < 2^16: scale 1
  row[1] = -3;
  const Row made = row_in("mxfp8_e5m2", row);
  EXPECT_EQ(made.scales, (std::vector<std::uint8_t>{127}));
  EXPECT_EQ(float8_e5m2_to_float(made.elements[0]), 57344);
  EXPECT_EQ(float8_e5m2_to_float(made.elements[1]), -3);
}

TEST(Mxfp8, InfinitiesAndNanSpoilTheirGroupAlone) {
  std::vector<float> row(96, 1.0F);
  row[3] = -std::numeric_limits<float>::infinity();
  row[40] = std::numeric_limits<float>::quiet_NaN();
  for (const char* name : {"mxfp8", "mxfp8_e5m2"}) {
    const Row made = row_in(name, row);
    EXPECT_EQ(made.scales[0], 0xFF);
    EXPECT_EQ(made.scales[1], 0xFF);
    EXPECT_EQ(made.elements[0], 0x7F);
    EXPECT_LT(made.scales[2], 127);
    std::vector<float> back(96);
    dequantize_row(payload_format(name, "format"), made.elements, made.scales, back.data(),
                   DType::float32);
    EXPECT_TRUE(std::isnan(back[0]) && std::isnan(back[63]));
    EXPECT_EQ(back[64], 1);
  }
}

TEST(Mxfp8, TheLeastScaleIsThatOfZeros) {
  std::vector<float> row(64, 0.0F);
  row[32] = 1e-45F;
  for (const char* name : {"mxfp8", "mxfp8_e5m2"}) {
    EXPECT_EQ(row_in(name, row).scales, (std::vector<std::uint8_t>{0, 0}));
  }
}

TEST(Float8Ue8m0, TheLeastPowerThatFits) {
  std::vector<float> row(256, 1.0F);
  row[0] = 448;
  row[128] = 449;
  const Row made = row_in("float8_ue8m0", row);
  EXPECT_EQ(made.scales, (std::vector<std::uint8_t>{127, 128}));
  EXPECT_EQ(made.elements[0], 0x7E);
  EXPECT_EQ(float8_e4m3fn_to_float(made.elements[128]), 224);
}

TEST(Nvfp4, TwoScales) {
  std::vector<float> row(32, 0.0F);
  row[0] = 2688;  // the row's scale is 1, this group's 448
  row[1] = -448;
  row[2] = 112;  // a quarter: ties go to 0
  row[16] = 12;  // the group's scale is 2
  row[17] = -5;  // 2.5, between 2 and 3
  row[19] = 1;
  const Row made = row_in("nvfp4", row);
  ASSERT_EQ(made.scales.size(), 16U);  // 2, then zeros, then the row's
  EXPECT_EQ(made.scales[0], 0x7E);
  EXPECT_EQ(float8_e4m3fn_to_float(made.scales[1]), 2);
  EXPECT_EQ(std::count(made.scales.begin() + 2, made.scales.begin() + 12, 0), 10);
  float of_row = 0;
  std::memcpy(&of_row, made.scales.data() + 12, 4);
  EXPECT_EQ(of_row, 1);
  EXPECT_EQ(made.elements[0], 0xA7);  // 6 in the low bits, -1 above
  EXPECT_EQ(made.elements[1], 0x00);
  EXPECT_EQ(made.elements[8], 0xC7);  // 6 and -2
  EXPECT_EQ(made.elements[9], 0x10);  // 0 and 0.5
  std::vector<float> back(32);
  dequantize_row(payload_format("nvfp4", "format"), made.elements, made.scales, back.data(),
                 DType::float32);
  EXPECT_EQ(back[0], 2688);
  EXPECT_EQ(back[1], -448);
  EXPECT_EQ(back[17], -4);
  EXPECT_EQ(back[19], 1);
}

TEST(Nvfp4, ANanSpoilsItsGroupAlone) {
  std::vector<float> row(32, 3.0F);
  row[2] = std::numeric_limits<float>::infinity();
  const Row made = row_in("nvfp4", row);
  EXPECT_EQ(made.scales[0], 0x7F);
  EXPECT_EQ(made.scales[1], 0x7E);
  EXPECT_EQ(made.elements[0], 0);
  EXPECT_EQ(made.elements[8], 0x77);
}

TEST(EPPayload, ItsNameIsTheWholeOfIt) {
  for (const char* name : {"plain", "float8", "scaled_float8", "mxfp8", "scaled_nvfp4",
                           "bytes(7168, 224)", "bytes(1, 0)"}) {
    EXPECT_EQ(EPPayload::from_name(name, "payload").name(), name);
  }
  EXPECT_EQ(EPPayload::from_name("quantized", "payload"), EPPayload::quantized);
  EXPECT_EQ(EPPayload::from_name("scaled", "payload"), EPPayload::scaled);
  EXPECT_NE(EPPayload::from_name("bytes(16, 4)", "p"), EPPayload::from_name("bytes(16, 8)", "p"));
  for (const char* name :
       {"", "Float8", "scaled_plain", "scaled_bytes", "bytes", "bytes(", "bytes()", "bytes(7)",
        "bytes(7,)", "bytes(7, 2", "bytes(7, 2, 3)", "bytes(0, 2)", "bytes(7, -1)",
        "bytes(4294967296, 0)", "bytes(99999999999999999999, 0)", "scaled_"}) {
    EXPECT_TRUE(test::rejects([&] { (void)EPPayload::from_name(name, "layer: payload"); },
                              {"layer: payload = \""}))
        << name;
  }
}

TEST(EPPayload, SizesOfRows) {
  const EPPayload bytes = EPPayload::from_name("bytes(100, 12)", "payload");
  EXPECT_EQ(bytes.row_dtype(DType::bfloat16), DType::uint8);
  EXPECT_EQ(bytes.row_items(512), 100);
  EXPECT_EQ(bytes.row_bytes(DType::bfloat16, 512), 100);
  EXPECT_EQ(bytes.scale_items(512), 12);
  EXPECT_TRUE(bytes.is_given());
  EXPECT_EQ(EPPayload::plain.row_bytes(DType::float32, 512), 2048);
  EXPECT_EQ(EPPayload::plain.scale_bytes(512), 0);
  EXPECT_EQ(EPPayload::quantized.row_bytes(DType::bfloat16, 512), 512);
  EXPECT_EQ(EPPayload::quantized.scale_bytes(512), 16);
}

}  // namespace
}  // namespace waybill
