#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "waybill/moe/expert_routing.h"

namespace waybill::detail {

/// Where the rows of one call lie, which all ranks compute alike: ranks that are threads of one
/// process compute it once and share it. At 1024 ranks the tables are 17 MB.
/// @param memory one part of the layer's memory, the same for all; the call is its `epoch`
[[nodiscard]] std::shared_ptr<const ExpertRows> share_rows(const std::shared_ptr<void>& memory,
                                                           std::uint64_t epoch,
                                                           const std::function<ExpertRows()>& make);

}  // namespace waybill::detail
