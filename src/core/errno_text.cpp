#include "core/errno_text.h"

#include <system_error>

namespace waybill::detail {

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace waybill::detail
