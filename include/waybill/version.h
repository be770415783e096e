#pragma once

#include <cstdint>
#include <string_view>

namespace waybill {

/// The version of these headers; the library that is linked must have the same major and minor one.
inline constexpr std::int32_t version_major = 0;
inline constexpr std::int32_t version_minor = 1;
inline constexpr std::int32_t version_patch = 0;
inline constexpr std::string_view version_text = "0.1.0";

}  // namespace waybill
