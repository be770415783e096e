#include "gpu_expert_params.h"

// Parameters of calls whose tokens go straight from node to node.

namespace waybill::cuda {

StraightBeginParams ExpertParams::straight_begin(const ExpertCall& call,
                                                 const ExpertDispatchInput& input,
                                                 const GpuExpertRouting& routing, bool counts,
                                                 const SignalPad& posted) const {
  StraightBeginParams params{};
  params.m = arrive(call, FaultKind::moe_dispatch);
  params.shape = shape(routing);
  if (counts) params.ids = input.ids.data;
  params.wide_ids = input.ids.dtype == DType::int64;
  params.dropped_id = options_.dropped(config_);
  params.counts = counts;
  params.weights = input.weights.data;
  params.weight_bytes = static_cast<std::int32_t>(dtype_bytes(config_.weight_dtype));
  params.workspaces = peers_of<std::byte>(memory_.workspace.table, 0);
  params.ids_offset = memory_.workspace_layout.forward_ids;
  params.weights_offset = memory_.workspace_layout.forward_weights;
  params.posted = peers_of<std::uint64_t>(posted.table, 0);
  params.own_posted = posted.local;
  return params;
}

StraightCombineParams ExpertParams::straight_combine(const ExpertCall& call,
                                                     const ExpertCombineInput& input,
                                                     const GpuExpertTables& tables) const {
  const GpuExpertRouting& routing = tables.routing();
  const std::int64_t own_slot =
      config_.rank / config_.local_world_size * config_.max_tokens * config_.topk;
  StraightCombineParams params{};
  params.m = arrive(call, FaultKind::moe_combine);
  params.shape = shape(routing);
  params.addresses = routing.part<std::int64_t>(routing.fixed().straight);
  params.ids = routing.part(routing.fixed().ids) + own_slot;
  params.windows = peers_of<const std::byte>(memory_.combine_windows[call.parity].table, 0);
  params.lost_row = static_cast<const std::byte*>(nan_row_.get());
  params.primary_only = options_.rows == EPRows::compact ? 1 : 0;
  params.row_bytes = config_.hidden * dtype_bytes(config_.token_dtype);
  if (input.options.weighted)
    params.weights = tables.weight_data() + own_slot * dtype_bytes(config_.weight_dtype);
  for (std::size_t i = 0; i < input.biases.size(); ++i) params.biases[i] = input.biases[i].data;
  params.output = input.output.data;
  return params;
}

}  // namespace waybill::cuda
