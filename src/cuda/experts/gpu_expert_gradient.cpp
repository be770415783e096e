#include "gpu_expert_gradient.h"

#include "call_params.h"
#include "launch.h"
#include "tables.h"

namespace waybill::cuda {
namespace {

const std::int32_t* num_recv_rows(const EPConfig& config, const GpuExpertTables& tables) {
  const GpuExpertRouting& routing = tables.routing();
  return routing.part(routing.fixed().num_recv_rows) + config.rank;
}

void begin(const GpuRank& gpu) {
  gpu.use();
  gpu.throw_fault();
}

}  // namespace

void weigh_gradients(const GpuRank& gpu, const EPConfig& config, const ExpertGradientInput& input,
                     const ExpertTables& tables, const Stream& stream) {
  begin(gpu);
  const auto& made = static_cast<const GpuExpertTables&>(tables);
  if (input.gradients.shape[0] == 0) return;
  const WeightGradientParams params{
      .gradients = input.gradients.data,
      .weights = input.weights.data,
      .rows = input.rows.data,
      .row_gradients = input.row_gradients.data,
      .weight_gradients = reinterpret_cast<float*>(input.weight_gradients.data),
      .hidden = config.hidden,
      .num_rows = input.gradients.shape[0],
      .num_recv_rows = num_recv_rows(config, made)};
  const bool wide =
      config.hidden % 8 == 0 && common_word({address_of(params.gradients), address_of(params.rows),
                                             address_of(params.row_gradients)}) == 16;
  gpu.check(launch_weight_gradient(params, config.token_dtype, config.weight_dtype, wide,
                                   2 * gpu.num_sms(), stream_of(stream)),
            "launching a kernel", "weigh_gradients");
  made.note_use(table_call(gpu, stream_of(stream)), false);
}

void copy_rows(const GpuRank& gpu, const EPConfig& config, const ConstTensorView& from,
               const TensorView& to, const ExpertTables& tables, const Stream& stream) {
  begin(gpu);
  const auto& made = static_cast<const GpuExpertTables&>(tables);
  if (from.shape[0] == 0) return;
  StageParams params{};
  params.shape.capacity_rows = from.shape[0];  // no row is missing, so nothing is reported
  params.input = from.data;
  params.num_rows = from.shape[0];
  params.window = to.data;
  params.row_bytes = config.hidden * dtype_bytes(from.dtype);
  params.num_recv_rows = num_recv_rows(config, made);
  const int word =
      common_word({address_of(params.input), address_of(params.window), params.row_bytes});
  gpu.check(launch_copy_rows(params, word, 2 * gpu.num_sms(), stream_of(stream)),
            "launching a kernel", "copy_rows");
  made.note_use(table_call(gpu, stream_of(stream)), false);
}

}  // namespace waybill::cuda
