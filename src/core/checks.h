#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "waybill/core/error.h"

// Checks of one number: `who` begins the text, `name` is the argument.
namespace waybill::detail {

/// @throws InvalidArgument "WHO: NAME = GOT, expected LOW..HIGH"
inline void check_range(const char* who, std::string_view name, std::int64_t got, std::int64_t low,
                        std::int64_t high) {
  require(low <= got && got <= high, who, ": ", name, " = ", got, ", expected ", low, "..", high);
}

/// @throws InvalidArgument "WHO: NAME = GOT, expected >= LOW"
inline void check_at_least(const char* who, std::string_view name, std::int64_t got,
                           std::int64_t low) {
  require(got >= low, who, ": ", name, " = ", got, ", expected >= ", low);
}

/// Infinity and NaN are no numbers.
inline void check_positive(const char* who, std::string_view name, double got) {
  require(std::isfinite(got) && got > 0, who, ": ", name, " = ", got, ", expected a number > 0");
}
inline void check_not_negative(const char* who, std::string_view name, double got) {
  require(std::isfinite(got) && got >= 0, who, ": ", name, " = ", got, ", expected a number >= 0");
}

}  // namespace waybill::detail
