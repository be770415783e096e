#include "core/number.h"

#include <gtest/gtest.h>

#include <cstdint>

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
