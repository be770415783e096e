#pragma once

#include <cstdint>

#include "waybill/experts/expert_tensors.h"

namespace waybill::detail {

/// What ExpertGradientInput says, in host memory, of the first `num_rows` rows.
void weigh_gradients(const ExpertGradientInput& input, std::int64_t num_rows);

}  // namespace waybill::detail
