#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/report/text_summary.h"

namespace waybill::detail {

[[nodiscard]] std::string pad_left(const std::string& text, std::size_t width);
[[nodiscard]] std::string pad_right(const std::string& text, std::size_t width);

/// A bar of 8 columns; anything above 0 shows.
[[nodiscard]] std::string bar(std::int64_t value, std::int64_t max, const TextStyle& style);

/// `text` in the colour of an ANSI code, where the style has colours.
[[nodiscard]] std::string paint(std::string_view text, std::string_view code,
                                const TextStyle& style);

/// "1.25 times"; three digits below 1.1.
[[nodiscard]] std::string times(double factor);

/// A line of its own.
[[nodiscard]] std::string heading(std::string_view text, const TextStyle& style);
[[nodiscard]] std::string labelled(std::string_view label, const std::string& value);

/// A sentence as an item of a list, in lines of 76 columns.
[[nodiscard]] std::string wrapped(const std::string& sentence, const TextStyle& style);

/// Ranks worth a line, ascending: all, or the first, the last, `always`, and those with the largest
/// weights. @param weights [W]
[[nodiscard]] std::vector<std::int32_t> shown_ranks(std::span<const std::int64_t> weights,
                                                    std::span<const std::int32_t> always,
                                                    int max_lines);

/// The lines of these ranks, and how many are left out between them.
[[nodiscard]] std::string rank_lines(std::span<const std::int32_t> shown, std::int32_t world_size,
                                     const std::function<std::string(std::int32_t)>& line_of,
                                     const TextStyle& style);

}  // namespace waybill::detail
