#pragma once

#include <cstddef>
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

/// The documents that cause the bytes in or out of `rank`, most bytes first; only those with bytes.
/// @throws InvalidArgument as summarize, and for a rank outside the world.
[[nodiscard]] std::vector<DocumentBytes> document_bytes(const QkvPlan& plan,
                                                        const QkvRouting& routing,
                                                        const RowBytes& row_bytes,
                                                        std::int32_t rank, Direction direction);

}  // namespace waybill

namespace waybill::detail {

/// Products and sums of counts. @throws InvalidArgument over 2^63 - 1; `who` begins the text.
[[nodiscard]] std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* who);
[[nodiscard]] std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* who);

/// Throws unless `routing` has the plan's world, shards and lengths.
void check_belongs(const QkvPlan& plan, const QkvRouting& routing, const RowBytes& row_bytes,
                   const char* who);

/// Over the ranks.
template <class Figures>
[[nodiscard]] std::int64_t sum_of(const std::vector<Figures>& ranks,
                                  std::int64_t Figures::*figure) {
  std::int64_t sum = 0;
  for (const Figures& rank : ranks) sum += rank.*figure;
  return sum;
}

/// Over the ranks; the first with the maximum.
template <class Figures>
[[nodiscard]] Spread spread_of(const std::vector<Figures>& ranks, std::int64_t Figures::*figure) {
  Spread spread{.max = -1};
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const std::int64_t value = ranks[r].*figure;
    spread.mean += static_cast<double>(value);
    if (value > spread.max) {
      spread.max = value;
      spread.max_rank = static_cast<std::int32_t>(r);
    }
  }
  spread.mean /= static_cast<double>(ranks.size());
  return spread;
}

}  // namespace waybill::detail
