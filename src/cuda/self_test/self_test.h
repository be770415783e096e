#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/sequence_plan.h"
#include "waybill/core/link_speeds.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

struct GpuSelfTestOptions {
  int num_sms = 16;  ///< each rank's
  int warmup = 3;    ///< calls before the timed ones
  int calls = 20;    ///< timed, from event to event
  double timeout_s = 60;
};

/// One operation of a self test.
struct GpuSelfTestStep {
  std::string name;              ///< "Q, K and V"
  std::int64_t link_bytes = 0;   ///< the busiest GPU sends so many to the others, or gets them
  std::int64_t local_bytes = 0;  ///< so many stay on one GPU, which reads and writes them
  double median_us = 0;          ///< the slowest rank's
  std::int64_t bytes_checked = 0;
  std::int64_t elements_wrong = 0;  ///< among those checked
};

/// The results of the GPUs of this host with a routing.
struct GpuSelfTest {
  int num_gpus = 0;
  std::int32_t world_size = 0;
  /// The best rate of several ways in the same run, per GPU and direction; 0 with one GPU.
  double link_gb_s = 0;
  double local_gb_s = 0;  ///< so measured: read and written by a copy on one GPU
  std::vector<GpuSelfTestStep> steps;

  /// Returns the least time that links and memory of these rates allow.
  [[nodiscard]] double limit_us(const GpuSelfTestStep& step) const;

  [[nodiscard]] bool passed() const;
};

/// Runs a step on the GPUs of this host, rank r on GPU r modulo their number: it sends Q, K and V
/// to the attention layout and Q back home, and, for floating types of 16 bits and more, sums the
/// gradients of K and V. The devices make the rows and compare every byte that arrives; sums are of
/// whole numbers, so they are exact. Then it times each operation.
/// @param q, kv formats of Q, and of K and of V
/// @throws Unsupported without a GPU or peer access, Timeout, CudaError (also when the rows do not
///   fit), InvalidArgument for options out of range
[[nodiscard]] GpuSelfTest try_on_gpus(const QkvRouting& routing, const TensorFormat& q,
                                      const TensorFormat& kv,
                                      const GpuSelfTestOptions& options = {});

/// The engine that moves the bytes of the probe. Devices without bulk copies use loads and stores
/// of the threads.
enum class LinkWay : std::uint8_t { push_bulk, push_vector, pull_bulk, copy_engines };

/// Every GPU copies `bytes_per_peer` to (or from) each of the others at once. The rate is that of
/// the slowest GPU's median time over `repeats` calls.
/// @return remote GB/s per GPU and direction; 0 with one GPU
/// @throws CudaError
[[nodiscard]] double link_gb_s(int num_gpus, LinkWay way, int num_sms, std::int64_t bytes_per_peer,
                               int repeats = 10);

/// Measures the links of this machine's GPUs: the best rate of pushes over numbers of
/// multiprocessors, and the rate of one of few. The rate of the network is that of `known`.
/// @throws Unsupported with fewer than two GPUs, or without access to each other; CudaError
[[nodiscard]] LinkSpeeds measure_links(int num_gpus, const LinkSpeeds& known = {});

/// Measures a local copy by a device-to-device cudaMemcpy: bytes read plus written per second, in
/// GB/s.
[[nodiscard]] double local_copy_gb_s(std::int64_t bytes);

}  // namespace waybill
