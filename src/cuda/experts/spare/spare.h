#pragma once

#include <cstdint>
#include <memory>

#include "../../planner/even_experts.h"
#include "../call_params.h"
#include "../tables.h"
#include "experts/expert_executor.h"
#include "params.h"

namespace waybill::cuda {

/// The copies of experts of a layer whose ranks map each other's memory: before a dispatch counts
/// and places rows, on nodes before it sends ids to other nodes, it counts those of experts, plans
/// copies and puts slots in place of ids. All of it is queued: three kernels, of which the first
/// waits for the counts of all ranks.
class SpareExperts {
 public:
  /// @throws Unsupported for more ranks than the planner has, and for more experts and slots than
  ///   fit into shared memory
  SpareExperts(const GpuExpertLayer& layer, const MoeShape& experts);
  SpareExperts(const SpareExperts&) = delete;
  SpareExperts& operator=(const SpareExperts&) = delete;
  /// Frees nothing while kernels may still use it.
  ~SpareExperts();

  /// Queues the kernels. The route of the same call takes slot_ids() next.
  /// @param experts made by ExpertParams::count. @param tables get the experts of the slots
  void plan(const ExpertCall& call, const RouteParams& experts, GpuExpertTables& tables,
            int num_sms) const;

  /// This rank's ids with slots in place of experts, once the kernels have run: [T, K] int32.
  [[nodiscard]] ConstTensorView slot_ids(const ExpertCall& call, std::int64_t num_tokens) const;

 private:
  [[nodiscard]] std::int32_t* ids_of(std::uint32_t parity) const;
  void plan_copies(const ExpertCall& call, const TableCall& table_call) const;

  const GpuExpertLayer& layer_;
  std::shared_ptr<GpuEvenExperts> planner_;
  std::shared_ptr<void> rows_;      ///< [W, E]
  std::shared_ptr<void> slot_ids_;  ///< [2, M, K], by parity of the dispatch
};

}  // namespace waybill::cuda
