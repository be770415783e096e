#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/sequence_plan.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

struct GpuSelfTestOptions {
  int num_sms = 16;  ///< of each rank
  int warmup = 3;    ///< calls before the timed ones
  int calls = 20;    ///< timed, from event to event
  double timeout_s = 60;
};

/// One operation of a self test.
struct GpuSelfTestStep {
  std::string name;              ///< "Q, K and V"
  std::int64_t link_bytes = 0;   ///< the most that one GPU sends to, or gets from, the others
  std::int64_t local_bytes = 0;  ///< the most that stay on one GPU, and are read and written there
  double median_us = 0;          ///< of the slowest rank
  std::int64_t bytes_checked = 0;
  std::int64_t elements_wrong = 0;  ///< of those checked
};

/// What the GPUs of this host did with a routing.
struct GpuSelfTest {
  int num_gpus = 0;
  std::int32_t world_size = 0;
  /// Measured in the same run, the best of several ways, a GPU and direction; 0 with one GPU.
  double link_gb_s = 0;
  double local_gb_s = 0;  ///< so measured: read and written by a copy on one GPU
  std::vector<GpuSelfTestStep> steps;

  /// The least time that links and memory of these rates allow.
  [[nodiscard]] double limit_us(const GpuSelfTestStep& step) const;

  [[nodiscard]] bool passed() const;
};

/// Carries a step out on the GPUs of this host, rank r on GPU r modulo their number: Q, K and V to
/// where attention is, Q back home, and, for floating types of 16 bits and more, the sums of the
/// gradients of K and V. Rows are made and every byte that arrives is compared on the devices;
/// sums are of whole numbers, hence exact. Each operation is then timed.
/// @param q, kv formats of Q, and of K and of V
/// @throws Unsupported without a GPU or peer access, Timeout, CudaError (also when the rows do not
///   fit), InvalidArgument for options out of range
[[nodiscard]] GpuSelfTest try_on_gpus(const QkvRouting& routing, const TensorFormat& q,
                                      const TensorFormat& kv,
                                      const GpuSelfTestOptions& options = {});

}  // namespace waybill
