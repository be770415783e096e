#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// For each step of each rank's network program how many crossings come before it, see
/// network_phases. [W][steps]
/// @throws InternalError when something waits for a slot that nobody raises, or for itself
[[nodiscard]] std::vector<std::vector<std::int32_t>> network_levels(
    std::span<const SequencePlan* const> plans);

}  // namespace waybill::detail
