#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/json/file.h"
#include "waybill/routing/generators.h"

namespace waybill {

/// "waybill.length_distributions", version 1: an object of histograms by name.
/// @throws InvalidArgument for a name twice, or a mean that is not finite.
[[nodiscard]] std::string to_json(const std::vector<LengthDistribution>& distributions,
                                  JsonStyle style = JsonStyle::readable);

/// The inverse, in the order of the text. Facts that LengthDistribution has no field for ("what",
/// "min", "mean", "percentiles_by_...") are allowed and skipped; "n_docs", where given, must be the
/// sum of the histogram.
/// @throws IoError `ORIGIN: /distributions/a/histogram/0/docs = -1, expected ...`
[[nodiscard]] std::vector<LengthDistribution> length_distributions_from_json(
    std::string_view text, std::string_view origin = "JSON");

/// The same from a file.
[[nodiscard]] std::vector<LengthDistribution> read_length_distributions(
    const std::filesystem::path& path);

/// data/doclen_distributions.json, which is compiled in. The first is "wlbllm".
[[nodiscard]] const std::vector<LengthDistribution>& builtin_length_distributions();

/// One of them by name: "wlbllm"; "dist_" in front, as in 0.1, is accepted.
/// @throws InvalidArgument listing the names.
[[nodiscard]] const LengthDistribution& length_distribution(std::string_view name);

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
