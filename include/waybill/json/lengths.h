#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

namespace waybill {

/// Document lengths in tokens, each 1..2^40: either a JSON list of integers, or plain text with
/// numbers separated by spaces, commas or line ends, where # begins a comment.
/// @param origin what errors call the text, usually the file
/// @throws IoError `ORIGIN: line 3: "12x", expected a document length in tokens, 1..2^40`; also for
///   a text without any.
[[nodiscard]] std::vector<std::int64_t> lengths_from_text(std::string_view text,
                                                          std::string_view origin = "text");

/// The same from a file.
[[nodiscard]] std::vector<std::int64_t> read_lengths(const std::filesystem::path& path);

}  // namespace waybill
