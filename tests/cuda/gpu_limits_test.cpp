// What kernels do on devices that have less: here the same device, with limits forced.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "cuda/experts/executor/executor.h"
#include "cuda/experts/kernels.h"
#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_step.h"
#include "cuda/rank/device_limits.h"
#include "support/with_hooks.h"

namespace waybill {
namespace {

/// Limits of kernels that are made meanwhile.
class Forced : test::WithHooks {
 public:
  explicit Forced(const char* hooks) : WithHooks(hooks) {}
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;
  ~Forced() {
    (void)detail::replace_test_hooks(nullptr);
    cuda::read_shared_bytes(0);
  }
};

void check_sequences() {
  const test::CasesOnGpu cases(2, 12, 1);
  run_gpu_thread_world(
      2, [&](World& world) { cases.check(world); }, test::world_options());
}

void check_experts() {
  test::check_random(test::config_of(2, 8, 4, 150, 128), {}, 6, 2, {8, 1});
  test::check_random(test::config_of(2, 16, 8, 100, 512), {.rows = EPRows::compact}, 6, 3, {8});
}

TEST(GpuLimits, kernels_have_what_the_device_can) {
  cudaDeviceProp properties{};
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  const int shared_bytes = cuda::read_shared_bytes(0);
  EXPECT_EQ(shared_bytes, static_cast<int>(properties.sharedMemPerBlockOptin));
  EXPECT_EQ(cuda::has_bulk_copies(0), properties.major >= 9 && shared_bytes >= 227 * 1024);
}

TEST(GpuLimits, sequences_without_bulk_copies) {
  const Forced vector("no_bulk_copies=1");
  EXPECT_FALSE(cuda::has_bulk_copies(0));
  check_sequences();
}

TEST(GpuLimits, experts_without_bulk_copies) {
  const Forced vector("no_bulk_copies=1");
  check_experts();
}

TEST(GpuLimits, sequences_with_99_kib_of_shared_memory) {
  const Forced small("max_shared_kb=99");
  EXPECT_EQ(cuda::read_shared_bytes(0), 99 * 1024);
  check_sequences();
}

TEST(GpuLimits, experts_with_99_kib_of_shared_memory) {
  const Forced small("max_shared_kb=99");
  check_experts();
  // As many as there is room for, and no more.
  const int most = cuda::max_experts_on_gpu(2) / 2 * 2;
  EXPECT_LT(most, 7000);
  test::check_random(test::config_of(2, most, 4, 60, 64), {}, 2, 4, {8});
}

/// As many blocks send as fill the links of this machine: those of another one, as measured.
TEST(GpuLimits, faster_links_have_more_blocks_that_send) {
  const EPConfig config = test::config_of(8, 256, 8, 4096, 7168);
  const auto senders = [&](const LinkSpeeds& links) {
    return cuda::num_sending_blocks(links, config, {.rows = EPRows::compact}, 64, 4096);
  };
  const LinkSpeeds twice{.nvlink_bytes_per_second = 700e9, .block_bytes_per_second = 45e9};
  EXPECT_EQ(senders({}), 8);
  EXPECT_EQ(senders(twice), 17);
}

}  // namespace
}  // namespace waybill
