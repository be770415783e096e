#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "waybill/cost_model/predict_step.h"
#include "waybill/report/plan_summary.h"

namespace waybill::detail {

/// An index that is known not to be negative.
template <class Integer>
[[nodiscard]] constexpr std::size_t to_size(Integer idx) {
  return static_cast<std::size_t>(idx);
}

/// Products and sums of counts. @throws InvalidArgument over 2^63 - 1; `who` begins the text.
[[nodiscard]] std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* who);
[[nodiscard]] std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* who);

/// Throws unless `gb_per_s` is a link's speed, or 0 where there is none.
void check_speed(double gb_per_s, const char* who);

/// Throws unless `routing` has the plan's world, shards and lengths.
void check_belongs(const QkvPlan& plan, const QkvRouting& routing, const RowBytes& row_bytes,
                   const char* who);

/// The share of a cause's document in what is busy, such as "66%".
[[nodiscard]] std::string document_percent(const StepCause& cause);

/// The document of each shard. [N]
[[nodiscard]] std::vector<std::int64_t> document_of_shards(const QkvPlan& plan);

}  // namespace waybill::detail
