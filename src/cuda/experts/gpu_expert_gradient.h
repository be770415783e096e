#pragma once

#include "../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "waybill/moe/ep_config.h"

namespace waybill::cuda {

// What a rank does by itself with rows that have arrived; the whole device does it. Functions of
// the same names of ExpertExecutor say what these do.

void weigh_gradients(const GpuRank& gpu, const EPConfig& config, const ExpertGradientInput& input,
                     const ExpertTables& tables, const Stream& stream);
void copy_rows(const GpuRank& gpu, const EPConfig& config, const ConstTensorView& from,
               const TensorView& to, const ExpertTables& tables, const Stream& stream);

}  // namespace waybill::cuda
