#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace waybill::detail {

/// Longest reason that one rank gives another, in bytes.
inline constexpr std::size_t max_reason_bytes = 2000;

/// What somebody else sent, fit for a message: at most max_bytes of it, bytes that a terminal would
/// act on replaced by spaces.
[[nodiscard]] std::string peer_text(std::string_view text,
                                    std::size_t max_bytes = max_reason_bytes);

/// The same between quotes; "none" for an empty text.
[[nodiscard]] std::string quoted_or_none(std::string_view text);

}  // namespace waybill::detail
