#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "../rank/gpu_rank.h"
#include "gpu_place.h"

namespace waybill::cuda {

/// The driver says of visible devices alone whether they reach each other. Of the others, which
/// processes have that see one GPU each, ranks find out by mapping a page of each other's memory.
/// Nothing is tried where every rank sees the GPUs of all that it maps.
///
/// Collective: all ranks of the world, whatever they map.
/// @param first, count the ranks whose memory this one maps, itself among them
/// @return what this rank cannot map, in the driver's words; empty: nothing
[[nodiscard]] std::string try_to_map(Bootstrap& bootstrap, std::string_view who,
                                     const std::vector<GpuPlace>& places, std::int32_t first,
                                     std::int32_t count, const GpuRank& gpu);

}  // namespace waybill::cuda
