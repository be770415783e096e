#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "../../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// Makes the store of copies of a rank of a GPU world. Collective.
/// @param share ranks on this device
/// @param maps_nodes the memory of ranks on other nodes is mapped
/// @throws Unsupported if a rank is not reached by load and store, or for too many copies
[[nodiscard]] std::unique_ptr<CopyStoreExecutor> make_gpu_copy_store(
    Transport& transport, std::shared_ptr<GpuRank> gpu, int share, bool maps_nodes,
    std::int64_t size_bytes, std::int32_t spare_experts, std::string_view name);

}  // namespace waybill::cuda
