#pragma once

#include <cstdint>
#include <memory>

#include "../../rank/gpu_rank.h"
#include "../call_params.h"
#include "../nodes/nodes.h"
#include "../params.h"
#include "../tables.h"
#include "experts/expert_executor.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// The combines of a layer. On one node ranks push if the layer has slabs; otherwise they pull.
/// Collective to make.
class GpuExpertCombine {
 public:
  /// @param nodes null on one node
  GpuExpertCombine(const GpuExpertLayer& layer, const ExpertParams& params, ExpertNodes* nodes);
  GpuExpertCombine(const GpuExpertCombine&) = delete;
  GpuExpertCombine& operator=(const GpuExpertCombine&) = delete;
  /// Frees nothing while other ranks may still use it.
  ~GpuExpertCombine();

  /// Queues a combine.
  /// @param num_sms blocks that communicate
  void run(const ExpertCall& call, const ExpertCombineInput& input, const GpuExpertTables& tables,
           int num_sms) const;

 private:
  void prepare() const;
  [[nodiscard]] bool pushes(const EPCombineOptions& options) const;
  [[nodiscard]] PushParams push_params(const ExpertCall& call, const ExpertCombineInput& input,
                                       const GpuExpertTables& tables) const;
  void push(const ExpertCall& call, const ExpertCombineInput& input, const GpuExpertTables& tables,
            int blocks) const;
  void stage(const ExpertCall& call, const ExpertCombineInput& input,
             const GpuExpertTables& tables) const;
  void sum(const CombineParams& params, int blocks, const ExpertCall& call) const;
  void combine_nodes(const ExpertCall& call, const ExpertCombineInput& input,
                     const GpuExpertTables& tables, const CombineParams& all, int sms) const;
  void check(cudaError_t status, const ExpertCall& call) const {
    layer_.gpu->check(status, "launching a kernel", call.operation);
  }
  [[nodiscard]] bool is_alone() const { return layer_.share == 1 && nodes_ == nullptr; }
  [[nodiscard]] bool sums_locally(const EPCombineOptions& options) const {
    return options.local_combine && nodes_ == nullptr && layer_.options.rows == EPRows::grouped;
  }
  /// Whether each rank contributes one row per token.
  [[nodiscard]] bool is_once(const EPCombineOptions& options) const {
    return options.local_combine || layer_.options.rows == EPRows::compact;
  }

  const GpuExpertLayer& layer_;
  const ExpertParams& params_;
  ExpertNodes* nodes_;
  SignalPad flags_;  ///< [units, W], see PushParams
};

}  // namespace waybill::cuda
