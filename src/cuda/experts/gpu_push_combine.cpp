#include "gpu_push_combine.h"

#include <utility>

namespace waybill::cuda {

PushTuning& push_tuning() {
  static PushTuning tuning;
  return tuning;
}

GpuPushCombine::GpuPushCombine(Transport& transport, const EPConfig& config,
                               const EPDispatchOptions& options, const ExpertMemory& memory,
                               const ExpertParams& params)
    : transport_(transport), config_(config), options_(options), memory_(memory), params_(params) {
  if (memory.slab_slots == 0) return;
  flags_ = transport.allocate_signals(
      most_push_units(config.max_tokens, config.topk) * config.world_size, "combine flags");
}

GpuPushCombine::~GpuPushCombine() { transport_.defer_release(std::move(flags_.memory)); }

bool GpuPushCombine::takes(const EPCombineOptions& options) const {
  return !push_tuning().pulls && memory_.slab_slots >= slab_slots(config_, is_once(options));
}

PushParams GpuPushCombine::params(const ExpertCall& call, const ExpertCombineInput& input,
                                  const GpuExpertTables& tables) const {
  const GpuExpertRouting& routing = tables.routing();
  const CombineParams sum = params_.combine(call, input, tables);
  const StageParams stage = params_.stage(call, input, tables);
  const SymmetricBuffer& slab = memory_.receive_slabs[call.parity];
  PushParams params{};
  params.m = sum.m;
  params.shape = sum.shape;
  params.push_warps = push_tuning().push_warps;
  params.once = is_once(input.options);
  params.slots = static_cast<std::int32_t>(slab_slots(config_, params.once));
  params.by_rank = params.once && config_.world_size < config_.topk;
  params.sums = sums(input.options);
  params.weight_dtype = config_.weight_dtype;
  params.row_bytes = sum.row_bytes;
  params.input = stage.input;
  params.num_rows = stage.num_rows;
  params.num_recv_rows = stage.num_recv_rows;
  params.records = routing.part(routing.fixed().records);
  params.num_input_tokens = stage.num_input_tokens;
  if (params.sums && input.options.weighted) params.received_weights = tables.received_weights();
  params.slabs = near_peers_of<std::byte>(slab, 0, 0, config_.world_size);
  params.flags = near_peers_of<std::uint64_t>(flags_, 0, 0, config_.world_size);
  params.own_slab = slab.local;
  params.own_flags = flags_.local;
  params.addresses = sum.addresses;
  params.lost_row = sum.lost_row;
  params.weights = sum.weights;
  params.biases = {{sum.biases[0], sum.biases[1]}, sum.output};
  return params;
}

}  // namespace waybill::cuda
