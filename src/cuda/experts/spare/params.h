#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"

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

/// Loads both kernels, see launch.h.
cudaError_t prepare_spare();

/// Begins a call: counts this rank's topk slots and brings those of all ranks to `rows`. It waits
/// for the counts of all ranks. The route that follows ends the call.
/// @param blocks fit on the device together
cudaError_t launch_count_experts(const SpareParams& params, int blocks, cudaStream_t stream);

/// Sends the rows of each expert to its slots, local first: as the host's slot_ids(). It waits for
/// nobody. @param blocks as of the count
cudaError_t launch_slot_ids(const SpareParams& params, int blocks, cudaStream_t stream);

}  // namespace waybill::cuda
