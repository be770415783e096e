#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace waybill {

/// "1,234,567"
[[nodiscard]] std::string format_count(std::int64_t count);

/// Three to four digits and a binary unit: "0 B", "812 B", "1.50 KiB", "23.4 GiB".
[[nodiscard]] std::string format_bytes(std::int64_t num_bytes);

/// Three digits and a decimal unit: "950", "1.20 k", "34.5 G".
[[nodiscard]] std::string format_si(double value);

/// "850 ns", "12.3 us", "4.56 ms", "1.20 s"
[[nodiscard]] std::string format_seconds(double seconds);

/// `value` with `digits` digits after the point.
[[nodiscard]] std::string format_fixed(double value, int digits);

/// "1 rank", "2 ranks"; `noun` takes a plain s.
[[nodiscard]] std::string format_plural(std::int64_t count, std::string_view noun);

}  // namespace waybill
