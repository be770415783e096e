#pragma once

#include <memory>

#include "../../network/network_path.h"
#include "../../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// Makes one layer of experts on a rank of a GPU world. Collective.
/// @param share ranks on this device
/// @param path carries what crosses between nodes; null: the world has no such path
/// @throws Unsupported if ranks of a node do not reach each other by load and store; if the layer
///   has several nodes, but no network path or other nodes than the world; if shared memory cannot
///   count so many experts
[[nodiscard]] std::unique_ptr<ExpertExecutor> make_gpu_expert_executor(
    Transport& transport, std::shared_ptr<GpuRank> gpu, int share, NetworkPath* path,
    const EPConfig& config, const EPDispatchOptions& options, const ExpertMemory& memory);

/// Number of blocks of a dispatch that send before they receive. They are limited by the links, and
/// their fraction of all blocks is that of sent rows among all rows. In low-latency calls all
/// blocks send.
[[nodiscard]] int num_sending_blocks(const LinkSpeeds& links, const EPConfig& config,
                                     const EPDispatchOptions& options, int blocks,
                                     std::int64_t num_tokens);

}  // namespace waybill::cuda
