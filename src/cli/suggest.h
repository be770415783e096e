#pragma once

#include <span>
#include <string>
#include <string_view>

namespace waybill::cli {

/// ", did you mean X?" where a word that is not known is close to one that is; else "".
[[nodiscard]] std::string did_you_mean(std::string_view word, std::span<const std::string> known);

/// Breaks lines of a help text at spaces; what follows stands below where the text of its line
/// began.
[[nodiscard]] std::string wrapped_help(std::string_view text, std::size_t width);

}  // namespace waybill::cli
