#pragma once

#include <string_view>

namespace waybill::detail {

/// data/doclen_distributions.json; the build generates the definition from the file.
[[nodiscard]] std::string_view builtin_length_distributions_text();

}  // namespace waybill::detail
