#pragma once

#include <memory>

#include "../transport/gpu_transport.h"
#include "gpu_rank.h"
#include "waybill/runtime/expert_executor.h"

namespace waybill::cuda {

/// One layer of experts on a rank of a GPU world. Collective. @param share ranks on this device
/// @throws Unsupported for ranks that do not reach each other by load and store, and for more
///   experts than shared memory counts
[[nodiscard]] std::unique_ptr<ExpertExecutor> make_gpu_expert_executor(
    GpuTransport& transport, std::shared_ptr<GpuRank> gpu, int share, const EPConfig& config,
    const EPDispatchOptions& options, const ExpertMemory& memory);

/// Blocks of a dispatch that send before they receive: as many as the links take, and a share of
/// `blocks` like that of rows that are sent among all; of few tokens all blocks send.
[[nodiscard]] int num_sending_blocks(const EPConfig& config, const EPDispatchOptions& options,
                                     int blocks, std::int64_t num_tokens);

}  // namespace waybill::cuda
