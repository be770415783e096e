#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "../../planner/even_experts.h"
#include "../call_params.h"
#include "../kernels.h"
#include "../tables.h"
#include "experts/expert_executor.h"

namespace waybill::cuda {

/// Parameters of the kernels that put slots in place of experts before a route. Between the two the
/// planner reads `rows` and writes the plan. P slots per rank, E experts.
struct SpareParams {
  /// A route of this rank's tokens to experts, not to slots: as of one node, with rows that are
  /// not compact, so that nothing but topk slots is counted. Its counts are words of their own.
  RouteParams experts;
  std::int32_t* rows;  ///< [W, E]: topk slots of each expert by source rank
  // The plan, [W, P] each: see EvenExperts.
  std::int32_t slots_per_rank;
  const std::int32_t* slots;
  const std::int32_t* quotas;
  const std::int32_t* local_rows;
  const std::int32_t* first_row;
  // slot_ids_kernel writes these.
  std::int32_t* slot_ids;      ///< [T, K]: slot s of rank r is r * P + s; W * P where dropped
  std::int32_t* slot_experts;  ///< [W, P] in the tables of the dispatch
  std::int32_t* slot_quotas;   ///< [W, P]
};
static_assert(sizeof(SpareParams) <= 4096);

/// Whether the counts of these experts and the lists of these slots fit into shared memory.
[[nodiscard]] bool spare_kernels_fit(const MoeShape& experts, std::int32_t num_slots);

/// Blocks of both kernels, at most num_sms: those of a route, and enough to read all counts.
[[nodiscard]] int spare_blocks(const MoeShape& experts, int num_sms);

/// Loads both kernels, see kernels.h.
cudaError_t prepare_spare();

/// Begins a call: counts this rank's topk slots and brings those of all ranks to `rows`. It waits
/// for the counts of all ranks. The route that follows ends the call.
/// @param blocks fit on the device together
cudaError_t launch_count_experts(const SpareParams& params, int blocks, cudaStream_t stream);

/// Sends the rows of each expert to its slots, local first: as the host's slot_ids(). It waits for
/// nobody. @param blocks as of the count
cudaError_t launch_slot_ids(const SpareParams& params, int blocks, cudaStream_t stream);

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
