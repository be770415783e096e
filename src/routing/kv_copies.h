#pragma once

#include <cstdint>
#include <optional>

#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// A routing with more copies of KV shards has tables for which a host may lack the memory.
inline constexpr std::int64_t max_kv_copies = std::int64_t{1} << 28;

/// The document with which the plan's copies of KV shards may be more than max_kv_copies. Each
/// shard is counted for every holder that its document can have. Does not check the plan.
[[nodiscard]] std::optional<std::int64_t> document_of_too_many_copies(const QkvPlan& plan);

}  // namespace waybill::detail
