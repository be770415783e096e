#pragma once

#include <cstdint>

namespace waybill {

/// Partial sums of a weight's gradient, see ExpertGradientInput.
inline constexpr std::int64_t gradient_partial_sums = 256;

}  // namespace waybill
