#include "spare.h"

#include "../../rank/gpu_rank.h"
#include "waybill/core/error.h"
#include "waybill/moe/expert_routing.h"

namespace waybill::cuda {
SpareExperts::SpareExperts(const GpuExpertLayer& layer, const MoeShape& experts) : layer_(layer) {
  if (!spare_kernels_fit(experts, layer.config.num_experts)) {
    throw Unsupported(concat("experts on GPUs: spare_experts = ", layer.options.spare_experts,
                             " with num_experts = ", experts.num_experts,
                             ", expected fewer: shared memory holds the counts of experts and the ",
                             "lists of slots"));
  }
  const cudaStream_t stream = layer_.gpu->stream();
  planner_ = std::make_shared<GpuEvenExperts>(experts.world_size, experts.num_experts,
                                              copy_options(layer.config, layer.options), stream);
  rows_ = device_memory(
      std::int64_t{experts.world_size} * experts.num_experts * std::int64_t{sizeof(std::int32_t)},
      stream);
  const std::int64_t ids = 2 * layer.config.max_tokens * layer.config.topk;
  if (!layer.plans_after_ids())
    slot_ids_ = device_memory(ids * std::int64_t{sizeof(std::int32_t)}, stream);
  cuda_check(prepare_spare(), "loading kernels");
}

SpareExperts::~SpareExperts() { layer_.transport.defer_release({planner_, rows_, slot_ids_}); }

std::int32_t* SpareExperts::ids_of(std::uint32_t parity) const {
  if (layer_.plans_after_ids()) {
    return reinterpret_cast<std::int32_t*>(layer_.memory.workspace.local +
                                           layer_.memory.workspace_layout.forward_ids);
  }
  return static_cast<std::int32_t*>(slot_ids_.get()) +
         parity * layer_.config.max_tokens * layer_.config.topk;
}

ConstTensorView SpareExperts::slot_ids(const ExpertCall& call, std::int64_t num_tokens) const {
  return {ids_of(call.parity), DType::int32, {num_tokens, layer_.config.topk}};
}

/// The planner's kernel; with `present` it reads the slots of an earlier dispatch.
void SpareExperts::plan_copies(const ExpertCall& call, const TableCall& table_call) const {
  const auto* const rows = static_cast<const std::int32_t*>(rows_.get());
  if (call.present == nullptr) return planner_->plan(rows, table_call.stream);
  const auto& earlier = static_cast<const GpuExpertTables&>(*call.present);
  const GpuExpertRouting& routing = earlier.routing();
  const std::int32_t homes = layer_.experts.num_experts_per_rank();
  planner_->plan(rows, routing.part(routing.tables().slot_experts) + homes,
                 layer_.config.num_experts_per_rank(), table_call.stream);
  earlier.note_use(table_call, false);
}

void SpareExperts::plan(const ExpertCall& call, const RouteParams& experts, GpuExpertTables& tables,
                        int num_sms) const {
  const TableCall of_call = table_call(*layer_.gpu, stream_of(call));
  GpuExpertRouting& made = *tables.being_made();
  const EvenExpertsParams& plan = planner_->tables();
  SpareParams params{};
  params.experts = experts;
  params.rows = static_cast<std::int32_t*>(rows_.get());
  params.slots_per_rank = layer_.config.num_experts_per_rank();
  params.slots = plan.slots;
  params.quotas = plan.quotas;
  params.local_rows = plan.local_rows;
  params.first_row = plan.first_row;
  params.slot_ids = ids_of(call.parity);
  params.slot_experts = made.part(made.tables().slot_experts);
  params.slot_quotas = made.part(made.tables().slot_quotas);
  const int blocks = spare_blocks(experts.shape, num_sms);
  const auto check = [&](cudaError_t status) {
    layer_.gpu->check(status, "launching a kernel", call.operation);
  };
  check(launch_count_experts(params, blocks, of_call.stream));
  plan_copies(call, of_call);
  check(launch_slot_ids(params, blocks, of_call.stream));
}

}  // namespace waybill::cuda
