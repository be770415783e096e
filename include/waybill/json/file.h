#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "waybill/core/index_array.h"

namespace waybill {

/// How JSON is laid out.
enum class JsonStyle : std::uint8_t {
  readable,  ///< a field a line; the numbers of an array on one line
  compact,   ///< no line breaks and no spaces
};

/// How far a reader looks.
enum class ReadCheck : std::uint8_t {
  values,  ///< form, and that the values can be meant: no negative lengths, ranks of the world ...
  form,    ///< only types and shapes, for a caller that validates and reports by itself
};

/// The most that is read: of a regular file, whose size is known before, and of anything else (a
/// pipe, a device, standard input), which may have no end.
inline constexpr std::int64_t max_file_bytes = std::int64_t{4} << 30;
inline constexpr std::int64_t max_stream_bytes = std::int64_t{1} << 30;

/// The whole file.
/// @throws IoError naming the file and the system's reason, or the limit.
[[nodiscard]] std::string read_file(const std::filesystem::path& path);

/// Standard input to its end.
/// @throws IoError naming the system's reason, or the limit.
[[nodiscard]] std::string read_standard_input();

/// Before work whose result write_file is to write: nothing changes.
/// @throws IoError as write_file would where the file cannot be made or written to
void require_writable(const std::filesystem::path& path);

/// Replaces the file by `text`, whole or not at all, also when the machine stops meanwhile: writes
/// a new file in its folder and renames that when it is on the disk. A link is followed; something
/// that is not a regular file (a device, a pipe) is written in place.
/// @throws IoError naming the file and the system's reason; what was there is then still there.
void write_file(const std::filesystem::path& path, std::string_view text);

/// Rows of each source rank for each expert, int64 [ranks, experts]: JSON (a list of a list per
/// rank, or an object that has it as "rows"), npy, or npz of numpy.savez (the array "rows", or the
/// only one). Floats are taken where they are integral.
/// @throws IoError naming the place, got and expected
[[nodiscard]] IndexArray expert_counts_from(std::string_view bytes, std::string_view origin);

/// The ids of the experts of each token, int64 [tokens, topk], -1 for a dropped topk slot: JSON (a
/// list of a list per token, or an object that has it as "ids").
/// @throws IoError naming the place, got and expected
[[nodiscard]] IndexArray expert_ids_from(std::string_view text, std::string_view origin);

}  // namespace waybill
