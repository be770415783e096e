#pragma once

#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

/// When plan_varlen_relay makes a schedule.
enum class VarlenRelayUse : std::uint8_t {
  where_links_gain,  ///< where the limit of the links is at least a tenth lower with it
  always,            ///< where any row crosses
};

/// How the K and V of a routing for kernels of variable lengths reach all ranks when receivers
/// forward them: the planner's relay, of the copies that such kernels need. A rank receives a row
/// once, however many of its contexts hold it. Linear in copies and hops but for a sort of the
/// ranks of a document; without a gain it ends before hops are made.
///
/// @param routing of the same plan
/// @param options its model, hardware and nothing else
/// @return hops of the entries of routing.fwd_kv; an empty schedule where there is none
/// @throws InvalidArgument for more than 2^24 hops
[[nodiscard]] RelaySchedule plan_varlen_relay(
    const QkvPlan& plan, const VarlenRouting& routing, const PlannerOptions& options,
    VarlenRelayUse use = VarlenRelayUse::where_links_gain);

/// The same hops by the entries of routing.sum_kv, for the way back of gradients.
[[nodiscard]] RelaySchedule relay_of_sums(const VarlenRouting& routing, RelaySchedule relay);

}  // namespace waybill
