// What the links of this host give: every GPU to every other at once.

#include <cstdio>

#include "cuda/self_test/self_test.h"
#include "waybill/cuda/gpu_world.h"

int main() {
  using waybill::link_gb_s;
  using waybill::LinkWay;
  const int gpus = waybill::num_gpus();
  std::printf("GPUs %d; local copy %.0f GB/s (read + written)\n", gpus,
              waybill::local_copy_gb_s(std::int64_t{1} << 30));
  if (gpus < 2) {
    std::printf("link: needs two GPUs, nothing measured\n");
    return 0;
  }
  constexpr std::int64_t bytes = std::int64_t{64} << 20;
  std::printf("64 MiB a peer, remote GB/s per GPU and direction, slowest GPU, median of 10\n");
  std::printf("%6s %12s %12s %12s\n", "SMs", "push bulk", "push vector", "pull bulk");
  for (const int sms : {4, 8, 12, 16, 24, 32, 64, 132}) {
    std::printf("%6d %12.1f %12.1f %12.1f\n", sms, link_gb_s(gpus, LinkWay::push_bulk, sms, bytes),
                link_gb_s(gpus, LinkWay::push_vector, sms, bytes),
                link_gb_s(gpus, LinkWay::pull_bulk, sms, bytes));
  }
  for (const int mib : {1, 16, 64, 256}) {
    std::printf("copy engines, %3d MiB a peer: %.1f GB/s\n", mib,
                link_gb_s(gpus, LinkWay::copy_engines, 1, std::int64_t{mib} << 20));
  }
  return 0;
}
