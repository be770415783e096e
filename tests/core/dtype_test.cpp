#include "waybill/core/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "waybill/core/error.h"

namespace waybill {
namespace {

const std::vector<DType>& all_dtypes() {
  static const std::vector<DType> all{
      DType::boolean, DType::int8,     DType::uint8,   DType::int16,         DType::int32,
      DType::uint32,  DType::int64,    DType::uint64,  DType::float8_e4m3fn, DType::float8_e5m2,
      DType::float16, DType::bfloat16, DType::float32, DType::float64};
  return all;
}

TEST(DType, sizes_are_those_of_the_element) {
  EXPECT_EQ(dtype_bytes(DType::boolean), 1);
  EXPECT_EQ(dtype_bytes(DType::int16), 2);
  EXPECT_EQ(dtype_bytes(DType::float8_e5m2), 1);
  EXPECT_EQ(dtype_bytes(DType::bfloat16), 2);
  EXPECT_EQ(dtype_bytes(DType::uint32), 4);
  EXPECT_EQ(dtype_bytes(DType::uint64), 8);
  EXPECT_EQ(dtype_bytes(DType::float64), 8);
}

TEST(DType, names_are_distinct_and_lead_back) {
  std::set<std::string> names;
  for (const DType dtype : all_dtypes()) {
    names.emplace(dtype_name(dtype));
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  }
  EXPECT_EQ(names.size(), all_dtypes().size());
  EXPECT_TRUE(names.contains("bool"));
  EXPECT_TRUE(names.contains("float8_e4m3fn"));
}

TEST(DType, short_names_are_understood) {
  EXPECT_EQ(dtype_from_name("bf16"), DType::bfloat16);
  EXPECT_EQ(dtype_from_name("fp8"), DType::float8_e4m3fn);
  EXPECT_EQ(dtype_from_name("fp16"), DType::float16);
  EXPECT_EQ(dtype_from_name("fp32"), DType::float32);
  EXPECT_EQ(dtype_from_name("fp64"), DType::float64);
  EXPECT_EQ(dtype_from_name("bytes"), DType::uint8);
}

TEST(DType, an_unknown_name_is_an_error_that_lists_the_known) {
  for (const char* name : {"", "int", "Int64", "torch.int64", "float8"}) {
    try {
      (void)dtype_from_name(name);
      FAIL() << name;
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("uint64"), std::string::npos) << text;
      EXPECT_NE(text.find("bf16"), std::string::npos) << text;
    }
  }
}

TEST(DType, a_value_outside_the_enumeration_is_an_error) {
  EXPECT_THROW((void)dtype_bytes(static_cast<DType>(200)), InvalidArgument);
  EXPECT_THROW((void)dtype_name(static_cast<DType>(14)), InvalidArgument);
}

TEST(DType, prints_its_name) {
  std::ostringstream text;
  text << DType::float16;
  EXPECT_EQ(text.str(), "float16");
  text << ' ' << static_cast<DType>(77);
  EXPECT_EQ(text.str(), "float16 dtype 77");
}

}  // namespace
}  // namespace waybill
