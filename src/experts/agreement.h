#pragma once

#include <cstdint>
#include <vector>

#include "experts/expert_executor.h"
#include "transport/settings.h"
#include "waybill/moe/ep_config.h"

// What the ranks of a layer of experts compare: once what never changes, and in each call the rest.

namespace waybill::detail {

/// What is the same on all ranks when the symmetric memory of a layer is made.
[[nodiscard]] std::vector<Setting> layer_settings(const EPConfig& config,
                                                  const EPDispatchOptions& options);

/// What a call means that has no inputs yet: format and options of the layer.
/// @param capacity_rows rows of the windows
[[nodiscard]] CallFingerprint layer_fingerprint(const EPConfig& config,
                                                const EPDispatchOptions& options,
                                                std::int64_t capacity_rows);

/// The same of a dispatch with counting.
[[nodiscard]] CallFingerprint counting_fingerprint(CallFingerprint layer,
                                                   const ExpertDispatchInput& input);

/// Of a dispatch by the routing that dispatch `routing` made.
[[nodiscard]] CallFingerprint known_fingerprint(CallFingerprint layer,
                                                const ExpertDispatchInput& input,
                                                std::uint32_t routing);

/// Of a combine of what dispatch `number` brought.
[[nodiscard]] CallFingerprint combine_fingerprint(CallFingerprint layer,
                                                  const ExpertCombineInput& input,
                                                  std::uint32_t number);

}  // namespace waybill::detail
