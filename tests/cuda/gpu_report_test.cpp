// What `waybill doctor` and `waybill calibrate` ask of GPUs.

#include "cuda/gpu_report.h"

#include <gtest/gtest.h>

#include "cuda/link_probe.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill {
namespace {

TEST(GpuReport, says_what_is_here) {
  const GpuReport report = report_gpus();
  ASSERT_EQ(static_cast<int>(report.gpus.size()), num_gpus());
  ASSERT_EQ(report.peer_access.size(), report.gpus.size());
  EXPECT_FALSE(report.driver.empty());
  for (const GpuFacts& gpu : report.gpus) {
    EXPECT_EQ(gpu.trouble, "");
    EXPECT_GE(gpu.major, 8);
    EXPECT_GT(gpu.num_sms, 8);
    EXPECT_GE(gpu.shared_bytes, 99 * 1024);
    EXPECT_FALSE(gpu.name.empty());
  }
  EXPECT_NE(report.nccl.empty(), report.nccl_trouble.empty());
  EXPECT_NE(report.nvshmem, !report.nvshmem_trouble.empty());
}

}  // namespace
}  // namespace waybill
