#include "numbers.h"

#include <charconv>

#include "waybill/core/error.h"

namespace waybill::cli {

std::optional<std::int64_t> parse_number(const std::string& text) {
  std::int64_t number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (status != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::function<std::string(const std::string&)> number_or_auto(std::int64_t min, std::int64_t max) {
  return [min, max](const std::string& text) -> std::string {
    const std::optional<std::int64_t> number = parse_number(text);
    if (text == "auto" || (number && min <= *number && *number <= max)) return "";
    return concat("got ", text, ", expected auto or a number from ", min, " to ", max);
  };
}

}  // namespace waybill::cli
