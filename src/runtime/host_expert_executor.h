#pragma once

#include <memory>

#include "waybill/runtime/expert_executor.h"
#include "waybill/transport/transport.h"

namespace waybill::detail {

/// For worlds whose windows are host memory. Calls return when their work is done.
/// @param memory outlives the result
[[nodiscard]] std::unique_ptr<ExpertExecutor> make_host_expert_executor(
    Transport& transport, const EPConfig& config, const EPDispatchOptions& options,
    const ExpertMemory& memory);

}  // namespace waybill::detail
