#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "waybill/transport/bootstrap.h"

namespace waybill {

/// Collective, for ranks that are threads of one process: every rank gives one block and holds all
/// of them afterwards. With `size` the ranks check that they ask for the same.
/// @throws InvalidArgument on all ranks when sizes differ; Unsupported when a rank is another
///   process; Timeout.
[[nodiscard]] std::vector<std::shared_ptr<void>> share_memory(Bootstrap& bootstrap,
                                                              std::shared_ptr<void> mine,
                                                              std::int64_t size,
                                                              std::string_view name);

}  // namespace waybill
