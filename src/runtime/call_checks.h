#pragma once

#include <span>

#include "schedule/sequence_plan.h"
#include "waybill/core/host_tensor.h"

namespace waybill::detail {

/// One tensor an entry of the plan: format, rows and adjacent elements. @throws InvalidArgument
void check_inputs(const char* who, const SequencePlan& plan,
                  std::span<const ConstTensorView> inputs);

/// The outputs of a gradient. @throws InvalidArgument
void check_outputs(const char* who, const SequencePlan& plan, std::span<const TensorView> outputs);

}  // namespace waybill::detail
