#include <gtest/gtest.h>

namespace waybill {
namespace {

/// Where the processor has a fused multiply-add, so that the compiler may be tempted.
#if defined(__x86_64__)
#define WAYBILL_TEST_FMA __attribute__((noinline, target("fma")))
bool has_fma() { return __builtin_cpu_supports("fma") != 0; }
#else
#define WAYBILL_TEST_FMA __attribute__((noinline))
bool has_fma() { return true; }
#endif

WAYBILL_TEST_FMA double scaled_sum(double a, double b, double c) { return a * b + c; }
WAYBILL_TEST_FMA float scaled_sum(float a, float b, float c) { return a * b + c; }

/// Products are rounded before they are added, on every machine: a plan, a prediction and the sums
/// of combine would differ else.
TEST(Contraction, products_are_rounded_before_they_are_added) {
  if (!has_fma()) GTEST_SKIP() << "this processor has no fused multiply-add";
  volatile double a = 1 + 0x1p-30;  // a * a = 1 + 2^-29 + 2^-60, of which the last
  // is rounded away; volatile, so that no compiler computes it
  EXPECT_EQ(scaled_sum(a, a, -(1 + 0x1p-29)), 0.0);
  volatile float b = 1 + 0x1p-14F;
  EXPECT_EQ(scaled_sum(b, b, -(1 + 0x1p-13F)), 0.0F);
}

}  // namespace
}  // namespace waybill
