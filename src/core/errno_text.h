#pragma once

#include <string>

namespace waybill::detail {

/// What the system says of an `errno`: "No such file or directory".
[[nodiscard]] std::string errno_text(int error);

}  // namespace waybill::detail
