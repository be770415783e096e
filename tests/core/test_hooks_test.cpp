#include "core/test_hooks.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/with_hooks.h"

namespace waybill::detail {
namespace {

TEST(TestHooks, AreReadFromAText) {
  EXPECT_EQ(parse_test_hooks("").delay_ns, 0);
  const TestHooks hooks = parse_test_hooks("delay_ns=200000,late_streams=7,no_bulk_copies=1");
  EXPECT_EQ(hooks.delay_ns, 200000);
  EXPECT_EQ(hooks.late_streams, 7);
  EXPECT_EQ(hooks.no_bulk_copies, 1);
  EXPECT_EQ(hooks.max_shared_kb, 0);
}

TEST(TestHooks, AnErrorSaysWhatThereIs) {
  for (const char* wrong : {"delay", "delay=1", "delay_ns", "delay_ns=", "delay_ns=1x",
                            "delay_ns=-1", "max_shared_kb=47", "unseen_gpus=yes", ",", "=1"}) {
    EXPECT_TRUE(test::rejects([&] { (void)parse_test_hooks(wrong); },
                              {"WAYBILL_TEST: \"", "delay_ns=0..1000000000, ",
                               "max_shared_kb=48..1024, ", "nvshmem_enforces=0..1, with commas"}))
        << wrong;
  }
  EXPECT_TRUE(test::rejects([] { (void)parse_test_hooks("no_bulk_copies=1,delays=2"); },
                            {"WAYBILL_TEST: \"delays=2\", expected "}));
}

TEST(TestHooks, OfATestHoldWhileItNeedsThem) {
  const std::int64_t before = test_hooks().delay_ns;
  {
    const test::WithHooks outer("delay_ns=5");
    const test::WithHooks inner("no_bulk_copies=1");
    EXPECT_EQ(test_hooks().delay_ns, 5);
    EXPECT_EQ(test_hooks().no_bulk_copies, 1);
  }
  EXPECT_EQ(test_hooks().delay_ns, before);
}

}  // namespace
}  // namespace waybill::detail
