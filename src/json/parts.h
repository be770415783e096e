#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "json/text.h"
#include "waybill/core/index_array.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// The members of the object that is open, without "format" and "version".
void write_plan_members(JsonWriter& writer, const QkvPlan& plan);
[[nodiscard]] QkvPlan read_plan(const JsonNode& node, ReadCheck check);

}  // namespace waybill::detail
