#pragma once

#include <atomic>
#include <cstdint>

#include "experts/expert_executor.h"
#include "gpu_expert_params.h"
#include "gpu_expert_tables.h"
#include "push_params.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// What benches and tests vary, the same on all ranks.
struct PushTuning {
  std::atomic<int> push_warps{2};  ///< quarters of a block's
  std::atomic<int> way{0};         ///< 1: no bulk copies
  std::atomic<bool> pulls{false};  ///< as if there were no slabs
};
PushTuning& push_tuning();

/// The combines of a layer that push: which ones do, and their parameters. Collective to make.
class GpuPushCombine {
 public:
  GpuPushCombine(Transport& transport, const EPConfig& config, const EPDispatchOptions& options,
                 const ExpertMemory& memory, const ExpertParams& params);
  GpuPushCombine(const GpuPushCombine&) = delete;
  GpuPushCombine& operator=(const GpuPushCombine&) = delete;
  /// Nothing is freed while other ranks may still use it.
  ~GpuPushCombine();

  /// Whether ranks push: by what all of them have and say alike.
  [[nodiscard]] bool takes(const EPCombineOptions& options) const;

  /// @pre takes(input.options)
  [[nodiscard]] PushParams params(const ExpertCall& call, const ExpertCombineInput& input,
                                  const GpuExpertTables& tables) const;

 private:
  [[nodiscard]] bool sums(const EPCombineOptions& options) const {
    return options.local_combine && options_.rows == EPRows::grouped;
  }
  [[nodiscard]] bool is_once(const EPCombineOptions& options) const {
    return options.local_combine || options_.rows == EPRows::compact;
  }

  Transport& transport_;
  EPConfig config_;
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  const ExpertParams& params_;
  SignalPad flags_;  ///< [units, W]
};

}  // namespace waybill::cuda
