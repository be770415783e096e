#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "waybill/core/error.h"
#include "waybill/moe/ep_config.h"

namespace waybill::detail {

// Names of the options of a dispatch, in Python and in errors.
inline constexpr std::array<std::string_view, 2> row_names{"grouped", "compact"};

[[nodiscard]] inline std::string_view name_of(EPRows rows) {
  return row_names.at(static_cast<std::size_t>(rows));
}

/// @throws InvalidArgument naming the argument, unless it is one of the names
template <class Option, std::size_t Count>
[[nodiscard]] Option option_of(const std::array<std::string_view, Count>& names,
                               std::string_view name, const char* argument) {
  std::string known;
  for (std::size_t i = 0; i < Count; ++i) {
    if (names[i] == name) return static_cast<Option>(i);
    known += concat(i == 0 ? "\"" : i + 1 == Count ? " or \"" : ", \"", names[i], "\"");
  }
  throw_invalid(argument, " = \"", name, "\", expected ", known);
}

}  // namespace waybill::detail
