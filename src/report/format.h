#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "waybill/core/link_speeds.h"
#include "waybill/report/plan_summary.h"

namespace waybill {

/// "1,234,567"
[[nodiscard]] std::string format_count(std::int64_t count);

/// Three to four digits and a binary unit: "0 B", "812 B", "1.50 KiB", "23.4 GiB".
[[nodiscard]] std::string format_bytes(std::int64_t num_bytes);

/// Three digits and a decimal unit: "950", "1.20 k", "34.5 G".
[[nodiscard]] std::string format_si(double value);

/// "850 ns", "12.3 us", "4.56 ms", "1.20 s"
[[nodiscard]] std::string format_seconds(double seconds);

/// As format_seconds, but "0" for 0.
[[nodiscard]] std::string format_moment(double seconds);

/// `value` with `digits` digits after the point.
[[nodiscard]] std::string format_fixed(double value, int digits);

/// "1 rank", "2 ranks"; `noun` takes a plain s.
[[nodiscard]] std::string format_plural(std::int64_t count, std::string_view noun);

}  // namespace waybill

namespace waybill::detail {

[[nodiscard]] std::string pad_left(const std::string& text, std::size_t width);
[[nodiscard]] std::string pad_right(const std::string& text, std::size_t width);

/// "1.25 times"; three digits below 1.1.
[[nodiscard]] std::string times(double factor);

/// "345 GB/s"
[[nodiscard]] std::string rate(double bytes_per_second);

/// The speed of a rank's network card, or of its links inside the node.
[[nodiscard]] double speed_of(const LinkSpeeds& speeds, bool network);

/// A line of its own.
[[nodiscard]] std::string heading(std::string_view text, const TextStyle& style);
[[nodiscard]] std::string labelled(std::string_view label, const std::string& value);

/// The words in lines of at most `width` columns, all but the first after an indentation.
[[nodiscard]] std::string wrapped(const std::string& text, std::size_t width,
                                  const std::string& indentation);

/// A sentence as an item of a list, in lines of 76 columns.
[[nodiscard]] std::string wrapped(const std::string& sentence, const TextStyle& style);

/// A heading and sentences below it.
[[nodiscard]] std::string meaning(std::string_view title, const std::vector<std::string>& sentences,
                                  const TextStyle& style);

/// A bar of 8 columns for a value of a maximum; anything above 0 shows.
[[nodiscard]] std::string load_bar(std::int64_t value, std::int64_t max, const TextStyle& style);

/// A line of a table of ranks: work of a maximum, and bytes in and out of one, with bars.
/// @param marked it sets the limit
[[nodiscard]] std::string rank_line(std::int32_t rank, std::int64_t tokens,
                                    std::pair<std::int64_t, std::int64_t> work,
                                    const std::string& work_text, std::int64_t bytes_in,
                                    std::int64_t bytes_out, std::int64_t max_bytes, bool marked,
                                    const TextStyle& style);

/// The lines of ranks that are worth one, and how many are left out between them: all, or the
/// first, the last, `always`, and those with the largest weights. @param weights [W]
[[nodiscard]] std::string rank_lines(std::span<const std::int64_t> weights,
                                     std::span<const std::int32_t> always,
                                     const std::function<std::string(std::int32_t)>& line_of,
                                     const TextStyle& style);

}  // namespace waybill::detail
