#pragma once

#include "schedule/sequence_plan.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::detail {

/// The tables behind a handle, for tests and the library's own programs; without any for an empty
/// one.
[[nodiscard]] const SequencePlan& compiled_plan(const PlanHandle& handle) noexcept;

}  // namespace waybill::detail
