#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace waybill {

/// The version of these headers; the library that is linked must have the same major and minor one.
/// It stands here alone: CMake and pip read it.
inline constexpr std::string_view version_text = "0.1.0";

namespace detail {
inline constexpr std::array<std::int32_t, 3> version_numbers = [] {
  std::array<std::int32_t, 3> numbers{};
  std::size_t at = 0;
  for (const char c : version_text) {
    if (c == '.') {
      ++at;
    } else {
      numbers[at] = 10 * numbers[at] + (c - '0');
    }
  }
  return numbers;
}();
}  // namespace detail

inline constexpr std::int32_t version_major = detail::version_numbers[0];
inline constexpr std::int32_t version_minor = detail::version_numbers[1];
inline constexpr std::int32_t version_patch = detail::version_numbers[2];

}  // namespace waybill
