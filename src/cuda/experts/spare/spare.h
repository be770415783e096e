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
  /// A route to experts, not to slots, with rows that are not compact, so that nothing but topk
  /// slots is counted: as of one node where kernels reach all ranks, else of the tokens that this
  /// rank forwards. Its counts are words of their own.
  RouteParams experts;
  std::int32_t* rows;  ///< [W, E]: topk slots of each expert by source rank
  // The plan, [W, P] each: see EvenExperts.
  std::int32_t slots_per_rank;
  const std::int32_t* slots;
  const std::int32_t* quotas;
  const std::int32_t* local_rows;
  const std::int32_t* first_row;
  // slot_ids_kernel writes these.
  /// [T, K]: slot s of rank r is r * P + s; W * P where dropped. Several nodes: [nodes, M, K], -1
  /// where there is no token; these may be the ids.
  std::int32_t* slot_ids;
  std::int32_t* slot_experts;  ///< [W, P] in the tables of the dispatch
  std::int32_t* slot_quotas;   ///< [W, P]
};
static_assert(sizeof(SpareParams) <= 4096);

/// Whether the counts of these experts and the lists of these slots fit into shared memory.
[[nodiscard]] bool spare_kernels_fit(const MoeShape& experts, std::int32_t num_slots);

/// Blocks of both kernels: those of a route, and enough to read all counts. With several nodes this
/// is the number per source, as route_blocks() says.
[[nodiscard]] int spare_blocks(const MoeShape& experts, int num_sms);

/// Loads both kernels, see kernels.h.
cudaError_t prepare_spare();

/// Counts topk slots and brings those of all ranks to `rows`. It waits for the counts of all ranks.
/// On one node it begins the call; the route that follows ends it.
/// @param blocks fit on the device together
cudaError_t launch_count_experts(const SpareParams& params, int blocks, cudaStream_t stream);

/// Sends the rows of each expert to its slots, local first: as the host's slot_ids(). It waits for
/// nobody. @param blocks as of the count
cudaError_t launch_slot_ids(const SpareParams& params, int blocks, cudaStream_t stream);

/// The copies of experts of a layer: before a dispatch counts and places rows, it counts those of
/// experts, plans copies and puts slots in place of ids. All of it is queued: three kernels, of
/// which the first waits for the counts of all ranks. Where memory is mapped this comes before ids
/// go to other nodes. Over a network it comes after that: each rank counts, and replaces, the ids
/// of its peers on all nodes, and ranks of a node send each other these counts.
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

  /// This rank's ids with slots in place of experts, once the kernels have run: [T, K] int32. Not
  /// where ids of all nodes are replaced in the workspace.
  [[nodiscard]] ConstTensorView slot_ids(const ExpertCall& call, std::int64_t num_tokens) const;

 private:
  [[nodiscard]] std::int32_t* ids_of(std::uint32_t parity) const;
  void plan_copies(const ExpertCall& call, const TableCall& table_call) const;

  const GpuExpertLayer& layer_;
  std::shared_ptr<GpuEvenExperts> planner_;
  std::shared_ptr<void> rows_;      ///< [W, E]
  std::shared_ptr<void> slot_ids_;  ///< [2, M, K], by parity of the dispatch; null: the workspace
};

}  // namespace waybill::cuda
