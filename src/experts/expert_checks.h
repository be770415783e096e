#pragma once

#include "waybill/experts/ep_all2all_layer.h"

namespace waybill::detail {

/// @throws InvalidArgument unless WAYBILL_COMBINE is push, pull or nothing
void check_combine_of_environment(const char* who);

/// Engines of GPUs have no sums in float64.
/// @throws Unsupported
void check_dtypes_of_engine(const World& world, const EPConfig& config, const char* who);

/// The tensors of a dispatch. @param ids_matter false: those of a layout are used
/// @throws InvalidArgument naming the argument
void check_dispatch_input(const EPConfig& config, const EPDispatchOptions& options,
                          const ExpertDispatchInput& input, bool ids_matter);

/// The tensors of a combine. @param num_rows -1: not known on the host
void check_combine_input(const EPConfig& config, const ExpertCombineInput& input,
                         std::int64_t num_rows, std::int64_t num_tokens);

void check_gradient_input(const EPConfig& config, const ExpertGradientInput& input);
void check_copied_rows(const EPConfig& config, const ConstTensorView& from, const TensorView& to);

}  // namespace waybill::detail
