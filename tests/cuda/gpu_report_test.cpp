// What `waybill doctor` and `waybill calibrate` ask of GPUs.

#include "cuda/gpu_report.h"

#include <gtest/gtest.h>

#include <cstdio>

#include "cuda/self_test/self_test.h"
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

TEST(GpuReport, measures_links) {
  if (num_gpus() < 2) GTEST_SKIP() << "needs two GPUs";
  const LinkSpeeds links = measure_links(num_gpus(), {.network_bytes_per_second = 12e9});
  // NVLink or PCIe: a multiprocessor gives some GB/s, and all of them more than one.
  EXPECT_GT(links.block_bytes_per_second, 1e9);
  EXPECT_GT(links.nvlink_bytes_per_second, 1.5 * links.block_bytes_per_second);
  EXPECT_EQ(links.network_bytes_per_second, 12e9);
  RecordProperty("nvlink_gb_s", static_cast<int>(links.nvlink_bytes_per_second / 1e9));
  std::printf("links: %.1f GB/s, a block %.1f GB/s\n", links.nvlink_bytes_per_second / 1e9,
              links.block_bytes_per_second / 1e9);
}

}  // namespace
}  // namespace waybill
