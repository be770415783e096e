#pragma once

#include <string_view>
#include <vector>

namespace waybill::detail {

/// The names that dtype_from_name takes: of every dtype, and the shorter ones that some have, too.
[[nodiscard]] std::vector<std::string_view> dtype_names();
[[nodiscard]] std::vector<std::string_view> short_dtype_names();

}  // namespace waybill::detail
