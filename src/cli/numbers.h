#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "waybill/core/link_speeds.h"

namespace waybill::cli {

/// A whole decimal number and nothing else; none when it is something else or too large.
[[nodiscard]] std::optional<std::int64_t> parse_number(const std::string& text);

/// A check of an option: "auto", or a number in the range.
[[nodiscard]] std::function<std::string(const std::string&)> number_or_auto(std::int64_t min,
                                                                            std::int64_t max);

/// A check of an option: a whole number in the range.
[[nodiscard]] std::function<std::string(const std::string&)> number_between(std::int64_t min,
                                                                            std::int64_t max);

/// A check of an option: a number in the range, neither nan nor inf.
[[nodiscard]] std::function<std::string(const std::string&)> real_between(double min, double max);

/// A check of an option: a whole number of 64 bits without a sign, as it stands. Read as one alone,
/// -1 wraps around, and what is too large becomes the largest.
[[nodiscard]] std::string check_seed(const std::string& text);

/// Speeds that make sense, in bytes per second.
inline constexpr double least_rate = LinkSpeeds::least;
inline constexpr double most_rate = LinkSpeeds::most;

/// Bytes per second from "50GB/s", "400Gbit/s", "400Gbps", "345" (GB/s); units B, kB, MB, GB, TB,
/// and bit or b in place of B; "ps" or "/s". None when it is something else, or not among
/// least_rate..most_rate.
[[nodiscard]] std::optional<double> parse_rate(const std::string& text);

/// A check of an option by parse_rate.
[[nodiscard]] std::string check_rate(const std::string& text);

}  // namespace waybill::cli
