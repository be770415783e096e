#pragma once

#include <memory>

#include "../network/network_path.h"
#include "../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// One layer of experts on a rank of a GPU world. Collective. @param share ranks on this device
/// @param path what crosses between nodes goes with it; null: nothing carries rows there
/// @throws Unsupported for ranks of a node that do not reach each other by load and store, for
///   several nodes without a network path or other ones than the world's, and for more experts than
///   shared memory counts
[[nodiscard]] std::unique_ptr<ExpertExecutor> make_gpu_expert_executor(
    Transport& transport, std::shared_ptr<GpuRank> gpu, int share, NetworkPath* path,
    const EPConfig& config, const EPDispatchOptions& options, const ExpertMemory& memory);

/// Blocks of a dispatch that send before they receive: as many as the links take, and a share of
/// `blocks` like that of rows that are sent among all; in low-latency calls all blocks send.
[[nodiscard]] int num_sending_blocks(const LinkSpeeds& links, const EPConfig& config,
                                     const EPDispatchOptions& options, int blocks,
                                     std::int64_t num_tokens);

}  // namespace waybill::cuda
