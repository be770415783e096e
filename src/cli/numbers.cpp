#include "numbers.h"

#include <charconv>
#include <cmath>
#include <string_view>

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

std::function<std::string(const std::string&)> number_between(std::int64_t min, std::int64_t max) {
  return [min, max](const std::string& text) -> std::string {
    const std::optional<std::int64_t> number = parse_number(text);
    if (number && min <= *number && *number <= max) return "";
    return concat("got ", text, ", expected ", min, "..", max);
  };
}

std::string check_seed(const std::string& text) {
  std::uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc() && rest == end) return "";
  return concat("got ", text, ", expected 0..2^64 - 1");
}

std::function<std::string(const std::string&)> real_between(double min, double max) {
  return [min, max](const std::string& text) -> std::string {
    double number = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    // The comparison is false for what is no number.
    if (error == std::errc() && rest == end && min <= number && number <= max) return "";
    return concat("got ", text, ", expected a number from ", min, " to ", max);
  };
}

namespace {

std::optional<double> bytes_per_second(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || !std::isfinite(number) || number <= 0) return std::nullopt;
  std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  if (unit.empty()) return number * 1e9;
  if (!unit.ends_with("/s") && !unit.ends_with("ps")) return std::nullopt;
  unit.remove_suffix(2);
  double scale = 1;
  if (unit.ends_with("bit")) {
    unit.remove_suffix(3);
    scale = 1.0 / 8;
  } else if (unit.ends_with("b")) {
    unit.remove_suffix(1);
    scale = 1.0 / 8;
  } else if (unit.ends_with("B")) {
    unit.remove_suffix(1);
  } else {
    return std::nullopt;
  }
  if (unit.empty()) return number * scale;
  const std::size_t power = std::string_view("kMGT").find(unit);
  if (unit.size() != 1 || power == std::string_view::npos) return std::nullopt;
  return number * scale * std::pow(1000.0, static_cast<double>(power + 1));
}

}  // namespace

std::optional<double> parse_rate(const std::string& text) {
  const std::optional<double> rate = bytes_per_second(text);
  return rate && least_rate <= *rate && *rate <= most_rate ? rate : std::nullopt;
}

std::string check_rate(const std::string& text) {
  return parse_rate(text)
             ? ""
             : concat("got ", text, ", expected a speed such as 50GB/s or 400Gbit/s, from ",
                      least_rate, " to ", most_rate, " bytes per second");
}

}  // namespace waybill::cli
