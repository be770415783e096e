#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "waybill/json/options.h"
#include "waybill/routing/metadata.h"

namespace waybill {

/// "waybill.metadata", version 1: every field under its name; an array as
/// `{"shape": [2, 3], "dtype": "int64", "data": [[...], [...]]}`, null for what is absent. In a
/// slice num_total_recv_tokens is one number. Read back it compares equal.
/// @throws InvalidArgument for a uint64 value over 2^63 - 1.
[[nodiscard]] std::string to_json(const Metadata& metadata, JsonStyle style = JsonStyle::readable);

/// The inverse. "format" and "version" may be absent, as may be what can be null.
/// @param origin what errors call the text, usually the file
/// @throws IoError `ORIGIN: /dst_rank/data/0/2 = "a", expected an integer`, or with line and column
///   for text that is not JSON. With ReadCheck::values also for shapes that disagree, a dst_rank
///   outside -1..2^20 - 1, and negative lengths, offsets and counts.
[[nodiscard]] Metadata metadata_from_json(std::string_view text, std::string_view origin = "JSON",
                                          ReadCheck check = ReadCheck::values);

/// The same from a file, and into one (see write_file).
[[nodiscard]] Metadata read_metadata(const std::filesystem::path& path,
                                     ReadCheck check = ReadCheck::values);
void write_metadata(const std::filesystem::path& path, const Metadata& metadata,
                    JsonStyle style = JsonStyle::readable);

}  // namespace waybill
