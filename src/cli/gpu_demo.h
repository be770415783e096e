#pragma once

#include <cstdint>

#include "options.h"
#include "program.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::cli {

/// GPUs of this host. @throws Unsupported, saying how to build, for a program without CUDA;
/// Unsupported where there is no GPU
[[nodiscard]] std::int32_t require_gpus();

/// Carries the plan out on the GPUs and prints, for each operation, the time that links and
/// memory allow (measured in the same run), the time that it took, and whether every byte was
/// right.
/// @return whether it was. @throws as try_on_gpus
bool run_gpu_demo(const QkvRouting& routing, const RowOptions& rows, int num_sms, Console& console);

}  // namespace waybill::cli
