#pragma once

#include <cmath>

#include "waybill/core/error.h"

namespace waybill::detail {

/// @throws InvalidArgument unless `got` is finite and above 0, or 0 where `zero_too`
inline void check_number(const char* who, const char* field, double got, bool zero_too) {
  require(std::isfinite(got) && (zero_too ? got >= 0 : got > 0), who, ": ", field, " = ", got,
          ", expected a number ", zero_too ? ">= 0" : "> 0");
}

}  // namespace waybill::detail
