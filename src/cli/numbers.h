#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace waybill::cli {

/// A whole decimal number and nothing else; none when it is something else or too large.
[[nodiscard]] std::optional<std::int64_t> parse_number(const std::string& text);

/// A check for CLI11: "auto", or a number in the range.
[[nodiscard]] std::function<std::string(const std::string&)> number_or_auto(std::int64_t min,
                                                                            std::int64_t max);

}  // namespace waybill::cli
