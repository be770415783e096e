#pragma once

#include "params.h"

namespace waybill::cuda {

/// Parameters of a kernel that moves rows, with what is known of the call when it is compiled: of
/// few tokens each instruction runs once, and code of other calls between them would be fetched,
/// too. Who sends ahead is alone on its device, on one node (GpuExpertExecutor::ahead_of).
template <Ahead known>
struct RowsOf : RowsParams {
  static constexpr bool waits = known == Ahead::nothing;
  static constexpr bool loads = known == Ahead::loads;
  static constexpr bool lands = known == Ahead::lands;

  [[nodiscard]] __device__ bool spans_nodes() const { return waits && shape.num_nodes > 1; }
  [[nodiscard]] __device__ bool fills() const { return lands || (waits && fills_tables); }
  /// Whether ranks have synchronized, and are to compare what they mean by the call here: of a
  /// routing that is known, on one node.
  [[nodiscard]] __device__ bool compares() const {
    return loads || (waits && !fills_tables && shape.num_nodes == 1);
  }
  [[nodiscard]] __device__ bool claims() const { return waits && claims_rows; }
};

}  // namespace waybill::cuda
