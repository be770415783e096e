#pragma once

#include <cstdint>
#include <vector>

#include "waybill/report/plan_summary.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

/// Where one document went.
struct DocumentFigures {
  std::int64_t document = 0;
  std::int64_t tokens = 0;
  std::int64_t num_shards = 0;
  std::int32_t num_home_ranks = 0;
  std::int32_t num_attending_ranks = 0;
};

/// All documents of a plan. [D]
/// @throws InvalidArgument when plan.check() does.
[[nodiscard]] std::vector<DocumentFigures> document_figures(const QkvPlan& plan);

/// Wire bytes that one document causes at a rank.
struct DocumentBytes {
  std::int64_t document = 0;
  std::int64_t q_bytes = 0;
  std::int64_t kv_bytes = 0;

  [[nodiscard]] std::int64_t bytes() const { return q_bytes + kv_bytes; }
};

/// The documents behind the bytes in or out of `rank`, most bytes first; only those with bytes.
/// @throws InvalidArgument as summarize, and for a rank outside the world.
[[nodiscard]] std::vector<DocumentBytes> document_bytes(const QkvPlan& plan,
                                                        const QkvRouting& routing,
                                                        const RowBytes& row_bytes,
                                                        std::int32_t rank, Direction direction);

}  // namespace waybill
